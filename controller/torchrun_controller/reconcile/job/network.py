"""The networks that NCCL uses on the nodes of a gang, and a warning of one that is certainly slow.

NCCL falls back to TCP without an error. Two facts are certain: the nodes of a gang differ, or NCCL
uses TCP although each pod requests a device for a faster network. TCP alone is no warning: without
such a device there may be no other network.
"""

import re

from torchrun_api.kinds.core import PodRequests
from torchrun_api.kinds.status import NetworkUse, TorchrunJobStatus
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import ObservedGang
from torchrun_controller.reconcile.pods import head_and_workers

CONDITION = "SlowNetwork"
SOCKET = "Socket"
# Extended resources of RDMA and EFA devices.
_DEVICES = re.compile(
    "|".join(
        (
            r"rdma/.+",  # the default prefix of github.com/Mellanox/k8s-rdma-shared-dev-plugin
            r"vpc\.amazonaws\.com/efa",  # github.com/aws/eks-charts, aws-efa-k8s-device-plugin
            # NVIDIA Network Operator: host devices, and VFs as its examples and OKE name them.
            r"nvidia\.com/(hostdev|roce.*|.*rdma.*)",
            # docs.cloud.google.com/ai-hypercomputer: the networks of A3 Ultra, A4 and A4X.
            r"networking\.gke\.io\.networks/rdma-\d+",
        )
    )
)
# Providers of libfabric over TCP (fi_provider(7)), alone or below rxm and rxd.
_TCP_PROVIDER = re.compile(r"(tcp|sockets|udp|net)\b")


def choose_network(
    last_status: TorchrunJobStatus, gang: ObservedGang, attempt: int
) -> tuple[NetworkUse, ...]:
    """Return what node 0 has reported, else what the status has of the same attempt.

    Reports are lost with the process of the controller, and come again within a minute.
    """
    if gang.restarts.network:
        return gang.restarts.network
    return last_status.network if last_status.attempt == attempt else ()


def find_slow(networks: tuple[NetworkUse, ...], gang: ObservedGang) -> Reason | None:
    """Return why the network is certainly slow; None if it is not, or nothing is known."""
    kinds = {_kind(use) for use in networks}
    if len(kinds) > 1:
        return Reason("NetworksDiffer", _describe_difference(networks))
    slow = next((use for use in networks if _is_tcp(use)), None)
    device = find_device(gang) if slow is not None else None
    if slow is None or device is None:
        return None
    return Reason(
        "FallbackToTCP",
        f"The pods request {device}, but NCCL uses {_describe(slow)}. The image may lack the"
        " libraries of the device, or NCCL's plugin for it. NCCL_DEBUG=INFO in spec.env shows what"
        " NCCL has tried.",
    )


def find_device(gang: ObservedGang) -> str | None:
    """Return a resource for a fast network that each pod of the gang requests."""
    # A webhook may add the request to the pods only, as on GKE.
    templates = [job.spec.template.spec for job in head_and_workers.jobs_of(gang)]
    for group in (templates, [pod.spec for pod in gang.workers]):
        devices = [_device_of(requests) for requests in group]
        if devices and all(devices):
            return devices[0]
    return None


def _device_of(requests: PodRequests) -> str | None:
    resources = (c.resources for c in requests.containers)
    found = (name for each in resources for name in (*each.requests, *each.limits))
    return next((name for name in found if _DEVICES.fullmatch(name)), None)


def _kind(use: NetworkUse) -> tuple[str, str]:
    """Two interfaces are the same network, two providers of libfabric are not."""
    return use.transport, "" if use.transport == SOCKET else use.device


def _is_tcp(use: NetworkUse) -> bool:
    return use.transport == SOCKET or _TCP_PROVIDER.match(use.device) is not None


def _describe_difference(networks: tuple[NetworkUse, ...]) -> str:
    uses = sorted(networks, key=lambda use: (not _is_tcp(use), use.nodes))
    first, *others = (f"{_describe(use)} on {_count(use)}" for use in uses)
    if len(uses) > 2:
        return f"NCCL uses {first}, {', '.join(others)}."
    odd, rest = uses
    who = f"Node {odd.first_node} uses" if odd.nodes == 1 else f"{_count(odd)} use"
    return f"{who} {_describe(odd)}, the other{'s' * (rest.nodes > 1)} {_describe(rest)}."


def _count(use: NetworkUse) -> str:
    if use.nodes == 1:
        return f"node {use.first_node}"
    return f"{use.nodes} nodes (the first: node {use.first_node})"


def _describe(use: NetworkUse) -> str:
    return f"{use.transport} over {use.device}" if use.device else use.transport
