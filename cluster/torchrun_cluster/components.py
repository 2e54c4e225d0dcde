"""The command line of each component: pure functions of a cluster's state.

On nodes, all of them run inside a node's network namespace, where etcd and the API server have
their usual ports; a control plane alone shares 127.0.0.1 with the host and uses claimed ones.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from .errors import ClusterError
from .state import NODE_ADDRESS, Node, Size, State

SERVICE_RANGE = "10.96.0.0/16"
SERVICE_ADDRESS = "10.96.0.1"
POD_RANGE = "10.244.0.0/16"
API_PORT_INSIDE = 6443
PAUSE_IMAGE = "localhost/torchrun-pause:latest"
"""Holds pods' namespaces and prepares volumes' folders."""
KAI_SCHEDULER = "kai-scheduler"


def api_endpoint(state: State) -> tuple[str, int]:
    """Address and port of the API server, for the other components."""
    if state.spec.size is Size.NODE:
        return NODE_ADDRESS, API_PORT_INSIDE
    return "127.0.0.1", state.ports.api


def etcd_ports(state: State) -> tuple[int, int]:
    """etcd's client and peer port on 127.0.0.1."""
    if state.spec.size is Size.NODE:
        return 2379, 2380
    return state.ports.etcd, state.ports.peer


def volcano_configuration(state: State) -> Path:
    """Actions and plugins of Volcano's scheduler."""
    return state.folder / "volcano-scheduler.conf"


def coscheduling_configuration(state: State) -> Path:
    """The profile of coscheduling's scheduler."""
    return state.folder / "coscheduling.json"


def kueue_configuration(state: State) -> Path:
    """Kueue's configuration file."""
    return state.folder / "kueue.json"


def kueue_certificates(state: State) -> Path:
    """The folder with the authority and the certificate of Kueue's webhooks."""
    return state.folder / "kueue-pki"


def command(state: State, component: str, binaries: Mapping[str, Path]) -> list[str]:
    """The whole command line of a component, the caller's extra arguments last."""
    arguments = {
        "etcd": _etcd,
        "kube-apiserver": _api_server,
        "kube-controller-manager": _controller_manager,
        "kube-scheduler": _scheduler,
        "coredns": _coredns,
        "local-path-provisioner": _local_path,
        "volcano-controllers": _volcano_controllers,
        "volcano-scheduler": _volcano_scheduler,
        "coscheduling-scheduler": _coscheduling,
        KAI_SCHEDULER: _kai_scheduler,
        "kai-binder": _kai_binder,
        "kueue": _kueue,
        "kuberay-operator": _kuberay,
    }
    of_nodes = {"containerd": _containerd, "kubelet": _kubelet, "kube-proxy": _proxy}
    part, node = state.place_of(component)
    if part in of_nodes:
        flags = of_nodes[part](node)
    elif component in arguments:
        flags = arguments[component](state)
    else:
        known = [*arguments, *of_nodes]
        raise ClusterError(f"unknown component {component!r}; there are {known}")
    program = [str(binaries.get(part, Path(part)))]
    if part == KAI_SCHEDULER:
        # It has no flag for this.
        program = ["env", f"KUBECONFIG={state.component_kubeconfig(part)}", *program]
    return [*program, *flags, *state.spec.extra_args.get(part, ())]


def _etcd(state: State) -> list[str]:
    client, peer = etcd_ports(state)
    return [
        "--name=cluster",
        f"--data-dir={state.folder / 'etcd'}",
        f"--listen-client-urls=http://127.0.0.1:{client}",
        f"--advertise-client-urls=http://127.0.0.1:{client}",
        f"--listen-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-advertise-peer-urls=http://127.0.0.1:{peer}",
        f"--initial-cluster=cluster=http://127.0.0.1:{peer}",
        f"--quota-backend-bytes={8 << 30}",
        "--log-level=warn",
        # A cluster that is thrown away need not survive a power cut.
        "--unsafe-no-fsync",
    ]


def _api_server(state: State) -> list[str]:
    address, port = api_endpoint(state)
    pki = state.certificates
    common = [
        f"--bind-address={'0.0.0.0' if state.spec.size is Size.NODE else address}",  # noqa: S104 in its own network namespace
        f"--secure-port={port}",
        f"--advertise-address={address}",
        f"--etcd-servers=http://127.0.0.1:{etcd_ports(state)[0]}",
        f"--client-ca-file={pki / 'ca.crt'}",
        f"--tls-cert-file={pki / 'kube-apiserver.crt'}",
        f"--tls-private-key-file={pki / 'kube-apiserver.key'}",
        f"--service-account-key-file={pki / 'sa.pub'}",
        f"--service-account-signing-key-file={pki / 'sa.key'}",
        "--service-account-issuer=https://kubernetes.default.svc.cluster.local",
        f"--service-cluster-ip-range={SERVICE_RANGE}",
        "--authorization-mode=Node,RBAC",
        "--allow-privileged=true",
        # Otherwise open watches hold up its end for a minute.
        "--shutdown-watch-termination-grace-period=1s",
    ]
    if state.spec.size is Size.CONTROL_PLANE:
        # 127.0.0.1 is not a valid endpoint of the Service `kubernetes`.
        return [*common, "--endpoint-reconciler-type=none"]
    return [
        *common,
        "--enable-admission-plugins=NodeRestriction",
        f"--kubelet-certificate-authority={pki / 'ca.crt'}",
        f"--kubelet-client-certificate={pki / 'apiserver-kubelet-client.crt'}",
        f"--kubelet-client-key={pki / 'apiserver-kubelet-client.key'}",
        # Otherwise logs and exec look the node's name up in DNS.
        "--kubelet-preferred-address-types=InternalIP",
    ]


def _controller_manager(state: State) -> list[str]:
    pki = state.certificates
    return [
        f"--kubeconfig={state.component_kubeconfig('kube-controller-manager')}",
        f"--root-ca-file={pki / 'ca.crt'}",
        f"--service-account-private-key-file={pki / 'sa.key'}",
        "--use-service-account-credentials=true",
        "--leader-elect=false",
        # The default is a folder of the host.
        f"--flex-volume-plugin-dir={state.folder / 'volume-plugins'}",
        # At the default of 20 a second, its own service accounts alone take five seconds.
        "--kube-api-qps=200",
        "--kube-api-burst=400",
        # No HTTPS port: two control planes on 127.0.0.1 would fight for it.
        "--secure-port=0",
    ]


def _scheduler(state: State) -> list[str]:
    return [
        f"--kubeconfig={state.component_kubeconfig('kube-scheduler')}",
        "--leader-elect=false",
        "--secure-port=0",
    ]


def _containerd(node: Node) -> list[str]:
    return ["--config", str(node.folder / "containerd.toml")]


def _coredns(state: State) -> list[str]:
    return ["-conf", str(state.folder / "Corefile")]


def _kubelet(node: Node) -> list[str]:
    kubeconfig = node.cluster.component_kubeconfig(node.component("kubelet"))
    return [
        f"--config={node.folder / 'kubelet.json'}",
        f"--kubeconfig={kubeconfig}",
        f"--hostname-override={node.name}",
        f"--node-ip={node.address}",
    ]


def _proxy(node: Node) -> list[str]:
    return [
        f"--kubeconfig={node.cluster.component_kubeconfig('kube-proxy')}",
        f"--hostname-override={node.name}",
        f"--cluster-cidr={POD_RANGE}",
        "--proxy-mode=iptables",
        # The machine's limits are not this cluster's business.
        "--conntrack-max-per-core=0",
    ]


def _local_path(state: State) -> list[str]:
    return [
        "start",
        f"--kubeconfig={state.component_kubeconfig('local-path-provisioner')}",
        f"--config={state.folder / 'local-path.json'}",
        f"--helper-pod-file={state.folder / 'volume-pod.json'}",
        f"--helper-image={PAUSE_IMAGE}",
        "--namespace=kube-system",
        "--service-account-name=default",
    ]


def _volcano_controllers(state: State) -> list[str]:
    return [
        f"--kubeconfig={state.component_kubeconfig('volcano-controllers')}",
        "--leader-elect=false",
        "--controllers=+pg-controller,+queue-controller",
    ]


def _volcano_scheduler(state: State) -> list[str]:
    return [
        f"--kubeconfig={state.component_kubeconfig('volcano-scheduler')}",
        f"--scheduler-conf={volcano_configuration(state)}",
        "--leader-elect=false",
        "--cache-dumper=false",
    ]


def _coscheduling(state: State) -> list[str]:
    return [f"--config={coscheduling_configuration(state)}", "--secure-port=0"]


def _kai_scheduler(state: State) -> list[str]:
    del state
    return ["--listen-address=127.0.0.1:0", "--plugin-server-port=0", "--v=1"]


def _kai_binder(state: State) -> list[str]:
    return [
        f"--kubeconfig={state.component_kubeconfig('kai-binder')}",
        "--metrics-bind-address=0",
        "--health-probe-bind-address=0",
    ]


def _kueue(state: State) -> list[str]:
    return [
        f"--kubeconfig={state.component_kubeconfig('kueue')}",
        f"--config={kueue_configuration(state)}",
    ]


def _kuberay(state: State) -> list[str]:
    return [
        f"--kubeconfig={state.component_kubeconfig('kuberay-operator')}",
        "--enable-leader-election=false",
        "--metrics-addr=0",
        "--health-probe-bind-address=0",
        # It runs outside of the pods, where the names of their Services are not known.
        "--use-kubernetes-proxy",
    ]
