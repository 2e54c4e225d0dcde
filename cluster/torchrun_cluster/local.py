"""A cluster of real parts on this machine, started and ended by us."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from . import (
    addons,
    binaries,
    certificates,
    cgroups,
    components,
    node,
    oci,
    packages,
    processes,
    state,
)
from .api import ApiServer, compact_etcd, wait_until
from .artefacts import locked
from .errors import ClusterError
from .forward import connect_inside
from .progress import say, step
from .state import NODE_ADDRESS, Size, Spec, State

DEFAULT_SERVICE_ACCOUNT = "/api/v1/namespaces/default/serviceaccounts/default"


class LocalCluster:
    """A local cluster by its name; `with` brings it up and takes it down.

    `extra_args` maps a component's name to flags that follow ours, for example
    `{"kube-apiserver": ["--feature-gates=GenericWorkload=true"]}`. `scheduler` adds
    kube-scheduler to a control plane; `kubernetes` is a release such as 1.33, "" the one that the
    variable KUBERNETES asks for. Raises ClusterError with what to do.
    """

    def __init__(
        self,
        *,
        name: str = "demo",
        size: Size = Size.NODE,
        port: int = 0,
        scheduler: bool = False,
        extra_args: Mapping[str, Sequence[str]] | None = None,
        kubernetes: str = "",
    ) -> None:
        arguments = {component: list(flags) for component, flags in (extra_args or {}).items()}
        release = kubernetes or binaries.wanted_kubernetes()
        self._spec = Spec(name, size, port, scheduler, arguments, release)
        unknown = set(arguments) - set(self._spec.components)
        if unknown:
            raise ClusterError(
                f"extra_args for {sorted(unknown)}: this cluster has {self._spec.components}"
            )
        self._state = state.read(name)

    @classmethod
    def existing(cls, name: str) -> LocalCluster:
        """The cluster of that name as it was brought up."""
        recorded = state.read(name)
        if recorded is None:
            raise ClusterError(f"there is no local cluster {name!r}; `up --name {name}` makes it")
        spec = recorded.spec
        return cls(
            name=name,
            size=spec.size,
            port=spec.port,
            scheduler=spec.scheduler,
            extra_args=spec.extra_args,
            kubernetes=spec.kubernetes,
        )

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.down()

    @property
    def kubeconfig(self) -> Path:
        """Cluster administrator's kubeconfig, complete in itself."""
        return self._up_state.kubeconfig

    @property
    def server(self) -> str:
        """The API server's URL."""
        return self._up_state.server

    @property
    def ca_file(self) -> Path:
        """Certificate of the authority that signed the API server's."""
        return self._up_state.certificates / "ca.crt"

    @property
    def client_certificate(self) -> Path:
        """The administrator's certificate; its key is `client_key`."""
        return self._up_state.certificates / "admin.crt"

    @property
    def client_key(self) -> Path:
        """The key of `client_certificate`."""
        return self._up_state.certificates / "admin.key"

    def log(self, component: str) -> Path:
        """Where the component's output goes."""
        return self._up_state.log(component)

    def up(self) -> None:
        """Bring the cluster up, or find it up; what a crash left is cleared first."""
        folder = state.folder_of(self._spec.name)
        if self._spec.size is Size.NODE:
            if os.geteuid() != 0:
                raise ClusterError("a node on this machine needs root; a control plane does not")
            node.check_places()
            packages.ensure(packages.NODE)
        programs = binaries.ensure(self._programs, self._spec.kubernetes)
        with locked(folder):
            if self._is_up(programs):
                return
            if any(folder.iterdir()):
                say(f"clearing what is left of an earlier cluster {self._spec.name!r}")
                self._clear(folder, keep_folder=True)
            self._state = state.create(self._spec)
            try:
                self._start_all(programs)
            except BaseException:
                # The logs stay for a look; the next `up` or `down` deletes them.
                processes.end(folder)
                raise
            self._state = self._state.completed()
            self._state.write()

    def down(self) -> None:
        """End the cluster's processes and delete all that it left; no error when there is none."""
        folder = state.folder_of(self._spec.name)
        if not folder.exists() and not processes.of_cluster(folder):
            return
        with locked(folder):
            self._clear(folder, keep_folder=False)
        self._state = None

    def install(self, name: str) -> None:
        """Add one of `addons.ADDONS` to the running cluster, or find it there."""
        addon, cluster = addons.find(name), self._up_state
        if name in cluster.addons:
            return
        programs = binaries.ensure(addon.subjects)
        with step(f"addon {name}"), locked(cluster.folder):
            for subject in addon.subjects.values():
                certificates.Authority(cluster.certificates).issue(subject)
                self._write_kubeconfig(subject)
            addons.apply(addon, name, cluster, self.kubectl)
            self._state = cluster.having({**cluster.addons, name: list(addon.subjects)})
            for component in addon.subjects:
                self._start(component, programs)
            api, check = ApiServer(cluster), self._check_alive(*addon.subjects)
            wait_until(lambda: addon.is_ready(api), f"{name}'s start", check)

    def uninstall(self, name: str) -> None:
        """Take an addon out again, with all objects of its kinds; no error when it is not there."""
        cluster = self._up_state
        if name not in cluster.addons:
            return
        with step(f"without addon {name}"), locked(cluster.folder):
            addons.delete_custom_resources(name, cluster, self.kubectl)
            for component in cluster.addons[name]:
                self.stop(component)
            addons.delete_rest(name, cluster, self.kubectl)
            self._state = cluster.having({k: v for k, v in cluster.addons.items() if k != name})

    def is_running(self, component: str) -> bool:
        """Whether the component has a live process."""
        return bool(processes.of_cluster(self._up_state.folder, component))

    def start(self, component: str) -> None:
        """Start a stopped component; for etcd and the API server wait until the API is ready."""
        if self.is_running(component):
            return
        self._start(component, binaries.ensure(self._programs, self._spec.kubernetes))
        if component in ("etcd", "kube-apiserver") and self.is_running("kube-apiserver"):
            self.wait_ready()

    def stop(self, component: str) -> None:
        """SIGTERM the component and wait for its end (60 s, then SIGKILL)."""
        processes.end(self._up_state.folder, component, signal.SIGTERM)

    def kill(self, component: str) -> None:
        """SIGKILL the component and wait for its end."""
        processes.end(self._up_state.folder, component, signal.SIGKILL)

    def restart(self, component: str) -> None:
        """Stop and start."""
        self.stop(component)
        self.start(component)

    def wait_ready(self, timeout: float = 120.0) -> None:
        """Wait until the API server says that it is ready to serve."""
        api, check = ApiServer(self._up_state), self._check_alive("etcd", "kube-apiserver")
        wait_until(lambda: api.exists("/readyz"), "the API server's readiness", check, timeout)

    def kubectl(
        self, *arguments: str, stdin: str | None = None, check: bool = True, timeout: float = 60.0
    ) -> subprocess.CompletedProcess[str]:
        """Run kubectl as the administrator; raises ClusterError with its stderr if `check`.

        A command that has not ended after `timeout` seconds is an error in any case.
        """
        try:
            result = subprocess.run(
                [str(binaries.ensure(["kubectl"], self._spec.kubernetes)["kubectl"]), *arguments],
                env={
                    **processes.without_marks(os.environ),
                    "KUBECONFIG": str(self.kubeconfig),
                    "KUBECACHEDIR": str(self._up_state.folder / "kubectl-cache"),
                },
                input=stdin,
                capture_output=True,
                text=True,
                timeout=timeout,
                check=False,
            )
        except subprocess.TimeoutExpired as error:
            raise ClusterError(
                f"kubectl {' '.join(arguments)}: no end within {timeout:.0f} s"
            ) from error
        if check and result.returncode:
            raise ClusterError(f"kubectl {' '.join(arguments)}: {result.stderr.strip()}")
        return result

    def compact_etcd(self) -> int:
        """Compact etcd's history up to now and return the revision.

        The API server goes on answering from its watch cache what it remembers; restart it, or
        run it with --watch-cache=false, to see 410 Gone.
        """
        address = ("127.0.0.1", components.etcd_ports(self._up_state)[0])
        if self._spec.size is Size.NODE:
            return compact_etcd(connect_inside(node.anchor_pid(self._up_state), address))
        return compact_etcd(socket.create_connection(address, timeout=5))

    def load_image(self, archive: Path) -> list[str]:
        """Import an OCI archive's images into the node; returns the names that were not there."""
        if self._spec.size is not Size.NODE:
            raise ClusterError("a control plane runs no pods; load images into a node cluster")
        return node.import_image(self._up_state, archive)

    @property
    def _up_state(self) -> State:
        if self._state is None:
            raise ClusterError(f"cluster {self._spec.name!r} is not up; call up() first")
        return self._state

    @property
    def _programs(self) -> tuple[str, ...]:
        added = self._state.added if self._state else ()
        whole = self._spec.size is Size.NODE
        return (*(binaries.NODE if whole else ("kubectl", *self._spec.components)), *added)

    def _is_up(self, programs: Mapping[str, Path]) -> bool:
        """Whether it was brought up and still serves; components that ended are started again."""
        recorded = state.read(self._spec.name)
        if recorded is None or not recorded.complete:
            return False
        alive = {process.component for process in processes.of_cluster(recorded.folder)}
        if not alive or (self._spec.size is Size.NODE and node.ANCHOR not in alive):
            return False
        spec = self._spec if self._spec.port else replace(self._spec, port=recorded.spec.port)
        if recorded.spec != spec:
            raise ClusterError(
                f"cluster {self._spec.name!r} runs with other settings ({recorded.spec}); "
                f"take it down first: down --name {self._spec.name}"
            )
        self._state = recorded
        ended = [component for component in recorded.components if component not in alive]
        for component in ended:
            say(f"{component} had ended and is started again")
            self._start(component, programs)
        self.wait_ready()
        return True

    def _start_all(self, programs: Mapping[str, Path]) -> None:
        api = ApiServer(self._up_state)
        with step("certificates"):
            self._write_certificates()
        if self._spec.size is Size.NODE:
            with step("namespaces and container runtime"):
                self._start_runtime(programs)
        with step("etcd and API server"):
            for component in ("etcd", "kube-apiserver"):
                self._start(component, programs)
            self.wait_ready()
        with step("controllers"):
            self._start_rest(programs)
            # Pods cannot be created before their namespace has this.
            self._wait(lambda: api.exists(DEFAULT_SERVICE_ACCOUNT), "the first service account")
        if self._spec.size is Size.NODE:
            with step("node"):
                api.create("/apis/storage.k8s.io/v1/storageclasses", node.storage_class())
                self._wait(api.node_is_ready, "the node's readiness")

    def _start_runtime(self, programs: Mapping[str, Path]) -> None:
        cluster = self._up_state
        node.start_namespaces(cluster)
        node.write_configuration(cluster)
        for component in ("forwarder", "containerd"):
            self._start(component, programs)
        self._wait_for_containerd()
        if node.forget_containers(cluster):
            # It keeps a list of them in memory.
            self.restart("containerd")
            self._wait_for_containerd()
        archive = cluster.folder / "pause.tar"
        oci.write_program_image(archive, components.PAUSE_IMAGE, programs["pause"])
        self.load_image(archive)

    def _wait_for_containerd(self) -> None:
        cluster = self._up_state
        check = self._check_alive("containerd")
        wait_until(lambda: node.containerd_answers(cluster), "containerd's start", check)

    def _start_rest(self, programs: Mapping[str, Path]) -> None:
        running = {process.component for process in processes.of_cluster(self._up_state.folder)}
        for component in self._spec.components:
            if component not in running:
                self._start(component, programs)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        wait_until(ready, what, self._check_alive(*self._spec.components))

    def _write_certificates(self) -> None:
        cluster = self._up_state
        pki = certificates.Authority(cluster.certificates)
        clients = [certificates.CONTROLLER_MANAGER, certificates.SCHEDULER]
        addresses = ["127.0.0.1", components.SERVICE_ADDRESS]
        others = [certificates.ADMIN]
        if self._spec.size is Size.NODE:
            addresses.append(NODE_ADDRESS)
            clients += [certificates.PROXY, certificates.DNS, certificates.VOLUMES]
            clients.append(certificates.kubelet(components.NODE_NAME, NODE_ADDRESS))
            others.append(certificates.API_TO_KUBELET)
        pki.create([*clients, *others, certificates.api_server(addresses)])
        pki.kubeconfig(cluster.kubeconfig, cluster.context, cluster.server, certificates.ADMIN)
        for client in clients:
            self._write_kubeconfig(client)

    def _write_kubeconfig(self, client: certificates.Subject) -> None:
        cluster = self._up_state
        server = "https://{}:{}".format(*components.api_endpoint(cluster))
        path, pki = cluster.component_kubeconfig(client.file), cluster.certificates
        certificates.Authority(pki).kubeconfig(path, cluster.context, server, client)

    def _start(self, component: str, programs: Mapping[str, Path]) -> None:
        cluster = self._up_state
        inside: list[str] = []
        if component == "forwarder":
            command = node.forwarder_command(cluster)
        else:
            command = components.command(cluster, component, programs)
            if self._spec.size is Size.NODE:
                inside = node.inside(cluster)
        processes.start(cluster.folder, component, command, cluster.log(component), inside)

    def _check_alive(self, *names: str) -> Callable[[], None]:
        cluster = self._up_state
        return processes.alive_check(cluster.folder, names, cluster.log)

    def _clear(self, folder: Path, *, keep_folder: bool) -> None:
        processes.end(folder)
        cgroups.remove(state.cgroup_of(folder))
        for path in folder.iterdir():
            if path.is_dir():
                shutil.rmtree(path)
            else:
                path.unlink()
        if not keep_folder:
            folder.rmdir()
