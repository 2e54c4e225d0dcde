"""Security contexts of a job's pods: defaults below the user's, the queue's level above all.

What each level allows: https://kubernetes.io/docs/concepts/security/pod-security-standards/. A job
that asks for more than its queue's level is refused, not changed in silence.
"""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.queue import PodSecurity, TorchrunQueue
from torchrun_controller.reconcile.objects.base import RESTRICTED_POD, RUNTIME_USER
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.merge import merge

# Usual images train as root, install packages and write to claims of other users, so root keeps
# CHOWN, DAC_OVERRIDE, FOWNER, SETUID and SETGID. No training makes devices or forges packets.
_POD: JsonObject = {"seccompProfile": {"type": "RuntimeDefault"}}
_TRAINER: JsonObject = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["MKNOD", "NET_RAW"]},
}
_RESTRICTED_CONTAINER: JsonObject = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
# A user that no image knows has neither a home nor a name; getpass.getuser(), by which
# torch.compile names its cache, fails then.
_HOMELESS: list[JsonObject] = [
    {"name": "HOME", "value": "/tmp"},  # noqa: S108  # the one directory of every image
    {"name": "USER", "value": "trainer"},
]

_KINDS = ("initContainers", "containers")
_BASELINE_CAPABILITIES = frozenset(
    {
        *("AUDIT_WRITE", "CHOWN", "DAC_OVERRIDE", "FOWNER", "FSETID", "KILL", "MKNOD"),
        *("NET_BIND_SERVICE", "SETFCAP", "SETGID", "SETPCAP", "SETUID", "SYS_CHROOT"),
    }
)
_SAFE_SYSCTLS = frozenset(
    {
        "kernel.shm_rmid_forced",
        *(f"net.ipv4.ip_{name}" for name in ("local_port_range", "local_reserved_ports")),
        *(f"net.ipv4.{name}" for name in ("ip_unprivileged_port_start", "ping_group_range")),
        *(f"net.ipv4.tcp_{name}" for name in ("syncookies", "fin_timeout", "rmem", "wmem")),
        *(f"net.ipv4.tcp_keepalive_{name}" for name in ("time", "intvl", "probes")),
    }
)
_SELINUX_TYPES = ("container_t", "container_init_t", "container_kvm_t", "container_engine_t")
_VOLUMES = frozenset(
    {
        *("configMap", "csi", "downwardAPI", "emptyDir", "ephemeral"),
        *("persistentVolumeClaim", "projected", "secret"),
    }
)


class _Control(msgspec.Struct, frozen=True):
    """One field of a PodSpec ("*" goes through a list) and the values that a level accepts."""

    path: str
    accepted: str
    accepts: Callable[[JsonValue], bool]


def _one_of(*values: str) -> Callable[[JsonValue], bool]:
    return lambda value: value is None or value in values


def _subset(allowed: frozenset[str]) -> Callable[[JsonValue], bool]:
    return lambda value: not isinstance(value, list) or allowed.issuperset(map(str, value))


def _off(value: JsonValue) -> bool:
    return not value


def _drops_all(value: JsonValue) -> bool:
    return isinstance(value, list) and "ALL" in value


_OF_CONTAINERS = tuple(f"{kind}.*.securityContext" for kind in _KINDS)
_ANYWHERE = ("securityContext", *_OF_CONTAINERS)

_BASELINE = (
    *(_Control(f"host{what}", "false", _off) for what in ("Network", "PID", "IPC")),
    _Control("volumes.*.hostPath", "other volumes", _off),
    _Control("securityContext.sysctls.*.name", "safe sysctls", lambda v: v in _SAFE_SYSCTLS),
    *(_Control(f"{kind}.*.ports.*.hostPort", "none", _off) for kind in _KINDS),
    *(
        control
        for where in _OF_CONTAINERS
        for control in (
            _Control(f"{where}.privileged", "false", _off),
            _Control(f"{where}.procMount", "Default", _one_of("Default")),
            _Control(
                f"{where}.capabilities.add",
                "of " + ", ".join(sorted(_BASELINE_CAPABILITIES)),
                _subset(_BASELINE_CAPABILITIES),
            ),
        )
    ),
    *(
        control
        for where in _ANYWHERE
        for control in (
            *(
                _Control(
                    f"{where}.{profile}.type",
                    "RuntimeDefault or Localhost",
                    _one_of("RuntimeDefault", "Localhost"),
                )
                for profile in ("seccompProfile", "appArmorProfile")
            ),
            _Control(f"{where}.windowsOptions.hostProcess", "false", _off),
            _Control(f"{where}.seLinuxOptions.user", "none", _off),
            _Control(f"{where}.seLinuxOptions.role", "none", _off),
            _Control(
                f"{where}.seLinuxOptions.type",
                ", ".join(_SELINUX_TYPES),
                _one_of("", *_SELINUX_TYPES),
            ),
        )
    ),
)
_RESTRICTED = (
    *_BASELINE,
    # A null of a template takes away what was filled in.
    _Control("securityContext.runAsNonRoot", "true", lambda v: v is True),
    _Control(
        "securityContext.seccompProfile.type",
        "RuntimeDefault or Localhost",
        lambda v: v in ("RuntimeDefault", "Localhost"),
    ),
    _Control("volumes.*", ", ".join(sorted(_VOLUMES)), lambda v: _is_volume(v)),
    *(
        control
        for where in _OF_CONTAINERS
        for control in (
            _Control(f"{where}.allowPrivilegeEscalation", "false", lambda v: v is False),
            _Control(f"{where}.capabilities.drop", "a list with ALL", _drops_all),
            _Control(
                f"{where}.capabilities.add",
                "NET_BIND_SERVICE",
                _subset(frozenset({"NET_BIND_SERVICE"})),
            ),
        )
    ),
    *(
        control
        for where in _ANYWHERE
        for control in (
            _Control(f"{where}.runAsNonRoot", "true", lambda v: v is not False),
            _Control(f"{where}.runAsUser", "any but 0", lambda v: v is None or bool(v)),
        )
    ),
)


def secured(template: JsonObject, queue: TorchrunQueue) -> JsonObject:
    """A v1 PodTemplateSpec with what it leaves open filled in, and judged by its queue's level.

    Raises:
        InvalidSpecError: it asks for more than the level allows.
    """
    level = queue.spec.pod_security
    spec = object_at(template, "spec")
    if level == "restricted":
        made = _filled(spec, "securityContext", RESTRICTED_POD)
        made |= {kind: _each(spec[kind], partial(_restricted, made)) for kind in _KINDS}
    else:
        made = _filled(spec, "securityContext", _POD)
        made["containers"] = _each(spec["containers"], _usual)
    if level is not None:
        _judge(made, level, queue.metadata.name)
    return {**template, "spec": made}


def _filled(body: JsonObject, field: str, defaults: JsonObject) -> JsonObject:
    return {**body, field: merge({field: defaults}, {field: body.get(field) or {}})[field]}


def _each(containers: JsonValue, secure: Callable[[JsonObject], JsonObject]) -> JsonValue:
    assert isinstance(containers, list)
    # What is no container is the API server's to refuse.
    return [secure(item) if isinstance(item, dict) else item for item in containers]


def _usual(container: JsonObject) -> JsonObject:
    """Of the user's own containers nothing is known."""
    context = object_at(container, "securityContext")
    if container.get("name") != names.TRAINER_CONTAINER or context.get("privileged"):
        return container
    return _filled(container, "securityContext", _TRAINER)


def _restricted(pod: JsonObject, container: JsonObject) -> JsonObject:
    made = _filled(container, "securityContext", _RESTRICTED_CONTAINER)
    user = object_at(made, "securityContext").get("runAsUser")
    if user is None:
        user = object_at(pod, "securityContext").get("runAsUser")
    if container.get("name") != names.TRAINER_CONTAINER or user != RUNTIME_USER:
        return made
    return {**made, "env": merge({"env": [*_HOMELESS]}, {"env": made["env"]})["env"]}


def _judge(spec: JsonObject, level: PodSecurity, queue: str) -> None:
    for control in _BASELINE if level == "baseline" else _RESTRICTED:
        for path, value in _values(spec, control.path):
            if not control.accepts(value):
                raise InvalidSpecError(
                    f"podTemplate.spec.{path} is {msgspec.json.encode(value).decode()[:80]}, but"
                    f" TorchrunQueue {queue} has podSecurity {level}, which accepts"
                    f" {control.accepted}"
                )


def _values(body: JsonValue, path: str) -> Iterator[tuple[str, JsonValue]]:
    """What stands at a path, None where there is nothing, with the path as a user writes it."""
    head, _, rest = path.partition(".")
    if head == "*":
        items = body if isinstance(body, list) else []
        found = [(f"[{_name(item, index)}]", item) for index, item in enumerate(items)]
    else:
        found = [(head, body.get(head) if isinstance(body, dict) else None)]
    for name, value in found:
        if not rest:
            yield name, value
            continue
        for inner, end in _values(value, rest):
            yield f"{name}{'' if inner.startswith('[') else '.'}{inner}", end


def _name(item: JsonValue, index: int) -> JsonValue:
    return item.get("name", index) if isinstance(item, dict) else index


def _is_volume(volume: JsonValue) -> bool:
    return isinstance(volume, dict) and _VOLUMES.issuperset(volume.keys() - {"name"})
