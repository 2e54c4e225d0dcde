"""The network plugin, and whether it is known to enforce NetworkPolicies."""

from collections.abc import Callable
from typing import NamedTuple

from kubectl_torchrun.doctor.environment import K3S, environment_of
from kubectl_torchrun.doctor.findings import Finding, field_at, items_at, name_of, words_at
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot
from torchrun_api.json import JsonObject


def _has_policy_agent(daemon_set: JsonObject) -> bool:
    """Whether the policy agent of the Amazon VPC CNI is turned on."""
    return any(
        argument.replace("'", "") == "--enable-network-policy=true"
        for container in items_at(daemon_set, "spec", "template", "spec", "containers")
        for argument in words_at(container, "args")
    )


class NetworkPlugin(NamedTuple):
    """A network plugin with the API groups and DaemonSets by which it is recognized."""

    title: str
    groups: tuple[str, ...] = ()
    daemon_sets: tuple[str, ...] = ()
    enforces: Callable[[JsonObject], bool] = lambda daemon_set: True


# Those that enforce policies beside another plugin, such as Canal's, come first.
_PLUGINS = (
    NetworkPlugin("Cilium", ("cilium.io",), ("cilium", "anetd")),
    NetworkPlugin(
        "Calico", ("crd.projectcalico.org", "projectcalico.org"), ("calico-node", "canal")
    ),
    NetworkPlugin("Antrea", ("crd.antrea.io",), ("antrea-agent",)),
    NetworkPlugin("OVN-Kubernetes", ("k8s.ovn.org",), ("ovnkube-node",)),
    NetworkPlugin("Azure Network Policy Manager", (), ("azure-npm",)),
    NetworkPlugin("kube-router", (), ("kube-router",)),
    NetworkPlugin("kube-network-policies", (), ("kube-network-policies",)),
    NetworkPlugin("Weave Net", (), ("weave-net",)),
    NetworkPlugin("Amazon VPC CNI", (), ("aws-node",), _has_policy_agent),
    NetworkPlugin("flannel", (), ("kube-flannel-ds", "kube-flannel"), lambda daemon_set: False),
)


def check_network(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether `networking.isolate` of the queues has an effect, as far as it is known."""
    isolated = [
        name_of(queue)
        for queue in snapshot.queues()
        if field_at(queue, "spec", "networking", "isolate") is True
    ]
    environment = environment_of(snapshot)
    title, enforces = _find_plugin(snapshot)
    if enforces:
        return [Finding("ok", "network", f"{title} enforces NetworkPolicies")]
    if not title and environment == K3S:
        text = "k3s enforces NetworkPolicies, unless it runs with --disable-network-policy"
        return [Finding("note", "network", text)]
    if not title:
        snapshot.read("daemonsets")  # raises why it cannot be read
        text = "The network plugin is not known, nor whether it enforces NetworkPolicies"
    else:
        text = f"{title} does not enforce NetworkPolicies"
    if not isolated:
        return [Finding("note", "network", f"{text}; no queue has networking.isolate")]
    text += f": networking.isolate of {', '.join(isolated)} may have no effect"
    return [Finding("warn", "network", text, environment.policies)]


def _find_plugin(snapshot: ClusterSnapshot) -> tuple[str, bool]:
    """The title of the plugin, and whether it enforces policies; "" if none is recognized."""
    groups = snapshot.groups()
    sets: dict[str, JsonObject] = {}
    if not snapshot.is_unreadable("daemonsets"):
        sets = {name_of(item): item for item in snapshot.items("daemonsets")}
    for plugin in _PLUGINS:
        if groups.intersection(plugin.groups):
            return plugin.title, True
        for name in plugin.daemon_sets:
            if name in sets:
                return plugin.title, plugin.enforces(sets[name])
    return "", False
