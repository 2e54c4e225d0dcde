"""Certificates and kubeconfigs of a cluster's components."""

from __future__ import annotations

from . import certificates, components
from .certificates import Authority, Subject
from .state import NODE_ADDRESS, Size, State


def write_all(cluster: State) -> None:
    """Make the cluster's authority, and what every component needs to prove who it is."""
    clients = [certificates.CONTROLLER_MANAGER, certificates.SCHEDULER]
    addresses = ["127.0.0.1", components.SERVICE_ADDRESS]
    others = [certificates.ADMIN]
    if cluster.spec.size is Size.NODE:
        addresses.append(NODE_ADDRESS)
        clients += [certificates.PROXY, certificates.DNS, certificates.VOLUMES]
        clients += [
            certificates.kubelet(node.component("kubelet"), node.name, node.address)
            for node in cluster.nodes
        ]
        others.append(certificates.API_TO_KUBELET)
    pki = Authority(cluster.certificates)
    pki.create([*clients, *others, certificates.api_server(addresses)])
    pki.kubeconfig(cluster.kubeconfig, cluster.context, cluster.server, certificates.ADMIN)
    for client in clients:
        _write_kubeconfig(cluster, client)


def issue(cluster: State, client: Subject) -> None:
    """Make the certificate and the kubeconfig of one more component."""
    Authority(cluster.certificates).issue(client)
    _write_kubeconfig(cluster, client)


def _write_kubeconfig(cluster: State, client: Subject) -> None:
    server = "https://{}:{}".format(*components.api_endpoint(cluster))
    path = cluster.component_kubeconfig(client.file)
    Authority(cluster.certificates).kubeconfig(path, cluster.context, server, client)
