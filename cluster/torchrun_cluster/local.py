"""A cluster of real parts on this machine, started and ended by us."""

from __future__ import annotations

import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Self

from . import (
    addons,
    binaries,
    cgroups,
    components,
    identities,
    kubectl,
    node,
    oci,
    packages,
    processes,
    state,
)
from .api import READY_TIMEOUT, ApiServer, compact_etcd, wait_until
from .artefacts import locked
from .errors import ClusterError
from .forward import connect_inside
from .progress import say, step
from .state import Node, Size, Spec, State

DEFAULT_SERVICE_ACCOUNT = "/api/v1/namespaces/default/serviceaccounts/default"


class LocalCluster:
    """A local cluster by its name; `with` brings it up and takes it down.

    `extra_args` maps a component's name to flags that follow ours, for example
    `{"kube-apiserver": ["--feature-gates=GenericWorkload=true"]}`. `scheduler` adds
    kube-scheduler to a control plane; `kubernetes` is a release such as 1.33, "" the one that the
    variable KUBERNETES asks for. Each of the `nodes` has a kubelet of its own; the first one has
    the control plane, too. Raises ClusterError with what to do.
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
        nodes: int = 1,
    ) -> None:
        arguments = {component: list(flags) for component, flags in (extra_args or {}).items()}
        release = kubernetes or binaries.wanted_kubernetes()
        self._spec = Spec(name, size, port, scheduler, arguments, release, nodes)
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
            nodes=spec.nodes,
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

    @property
    def nodes(self) -> tuple[Node, ...]:
        """The nodes; the first one has the control plane, too."""
        return self._up_state.nodes if self._spec.size is Size.NODE else ()

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
                identities.issue(cluster, subject)
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
        # A process that has just started may not show while it executes its program.
        if component == "kube-apiserver" or (
            component == "etcd" and self.is_running("kube-apiserver")
        ):
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

    def power_off(self, name: str) -> None:
        """SIGKILL everything on a node but the first, containers included, as if it lost power."""
        further = self._further_node(name)
        node.disconnect(further)
        for part in (*state.NODE_COMPONENTS, "namespaces"):
            processes.end(further.cluster.folder, further.component(part))

    def power_on(self, name: str) -> None:
        """Start a node again that was powered off; its disk is as it was."""
        programs = binaries.ensure(self._programs, self._spec.kubernetes)
        self._boot(self._further_node(name), programs)
        self._start_rest(programs)

    def inside(self, name: str) -> list[str]:
        """A command that runs the rest of its arguments in the namespaces of a node."""
        return node.inside(self._up_state.node(name))

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
        program = binaries.ensure(["kubectl"], self._spec.kubernetes)["kubectl"]
        return kubectl.run(program, self._up_state, arguments, stdin, timeout, check=check)

    def compact_etcd(self) -> int:
        """Compact etcd's history up to now and return the revision.

        The API server goes on answering from its watch cache what it remembers; restart it, or
        run it with --watch-cache=false, to see 410 Gone.
        """
        address = ("127.0.0.1", components.etcd_ports(self._up_state)[0])
        if self._spec.size is Size.NODE:
            return compact_etcd(connect_inside(node.anchor_pid(self.nodes[0]), address))
        return compact_etcd(socket.create_connection(address, timeout=READY_TIMEOUT))

    def load_image(self, archive: Path) -> list[str]:
        """Import an OCI archive's images into all nodes; returns the names that one had not."""
        if self._spec.size is not Size.NODE:
            raise ClusterError("a control plane runs no pods; load images into a node cluster")
        with ThreadPoolExecutor() as pool:
            names_by_node = list(pool.map(lambda one: node.import_image(one, archive), self.nodes))
        return sorted({name for names in names_by_node for name in names})

    def _further_node(self, name: str) -> Node:
        further = self._up_state.node(name)
        if further.number == 1:
            raise ClusterError(f"{name} has the control plane: take the cluster down")
        return further

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
        dead = [component for component in recorded.components if component not in alive]
        for component in dead:
            say(f"{component} had ended and is started again")
        for one in self.nodes:
            if one.component(node.ANCHOR) in dead:
                self._boot(one, programs)
        self._start_rest(programs)
        self.wait_ready()
        return True

    def _start_all(self, programs: Mapping[str, Path]) -> None:
        api = ApiServer(self._up_state)
        with step("certificates"):
            identities.write_all(self._up_state)
        if self._spec.size is Size.NODE:
            with step("namespaces and container runtime"):
                self._start_nodes(programs)
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
                self._wait(lambda: api.nodes_are_ready(self._spec.nodes), "the nodes' readiness")

    def _start_nodes(self, programs: Mapping[str, Path]) -> None:
        cluster = self._up_state
        node.write_shared_configuration(cluster)
        for one in self.nodes:
            node.write_configuration(one)
        for one in self.nodes:
            self._boot(one, programs)
            if node.forget_containers(one):
                # It keeps a list of them in memory.
                self.stop(one.component("containerd"))
                self._start_containerd(one, programs)
        self._start("forwarder", programs)
        archive = cluster.folder / "pause.tar"
        oci.write_program_image(archive, components.PAUSE_IMAGE, programs["pause"])
        self.load_image(archive)

    def _boot(self, one: Node, programs: Mapping[str, Path]) -> None:
        """Make a node's namespaces and connect them, and start its container runtime."""
        node.start_namespaces(one)
        if one.number > 1:
            node.connect(one)
        self._start_containerd(one, programs)

    def _start_containerd(self, one: Node, programs: Mapping[str, Path]) -> None:
        containerd = one.component("containerd")
        self._start(containerd, programs)
        check = self._check_alive(containerd)
        wait_until(lambda: node.containerd_answers(one), "containerd's start", check)

    def _start_rest(self, programs: Mapping[str, Path]) -> None:
        running = {process.component for process in processes.of_cluster(self._up_state.folder)}
        for component in self._up_state.components:
            if component not in running:
                self._start(component, programs)

    def _wait(self, ready: Callable[[], bool], what: str) -> None:
        wait_until(ready, what, self._check_alive(*self._spec.components))

    def _start(self, component: str, programs: Mapping[str, Path]) -> None:
        cluster = self._up_state
        inside: list[str] = []
        if component == "forwarder":
            command = node.forwarder_command(cluster)
        else:
            command = components.command(cluster, component, programs)
            if self._spec.size is Size.NODE:
                inside = node.inside(cluster.place_of(component)[1])
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
