"""Security contexts of a job's pods: defaults, and the check against the queue's podSecurity.

Users may set what the level allows
(https://kubernetes.io/docs/concepts/security/pod-security-standards/). A job that violates it is
refused, never changed in silence.
"""

from collections.abc import Callable, Iterator
from functools import partial

import msgspec

from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue, object_at
from torchrun_api.kinds.queue import PodSecurity, TorchrunQueue
from torchrun_controller.reconcile.objects.base import RESTRICTED_POD, RUNTIME_USER
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.merge import merge

# Common images train as root, install packages and write to PVCs of other users. So root keeps
# CHOWN, DAC_OVERRIDE, FOWNER, SETUID and SETGID. Training needs no devices and no raw sockets.
_POD: JsonObject = {"seccompProfile": {"type": "RuntimeDefault"}}
_TRAINER: JsonObject = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["MKNOD", "NET_RAW"]},
}
_RESTRICTED_CONTAINER: JsonObject = {
    "allowPrivilegeEscalation": False,
    "capabilities": {"drop": ["ALL"]},
}
# A uid that is not in the image has no home and no name. Without them getpass.getuser() fails, and
# torch.compile names its cache after it.
_USER_VARIABLES: list[JsonObject] = [
    {"name": "HOME", "value": "/tmp"},  # noqa: S108  # every image has it
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
    """A field of a PodSpec ("*": all items of a list), and the values that a level accepts."""

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
_CALLERS = (
    *("livenessProbe", "readinessProbe", "startupProbe"),
    *("lifecycle.postStart", "lifecycle.preStop"),
)
_APPARMOR = "container.apparmor.security.beta.kubernetes.io/"
_ANYWHERE = ("securityContext", *_OF_CONTAINERS)

_BASELINE = (
    *(_Control(f"host{what}", "false", _off) for what in ("Network", "PID", "IPC")),
    _Control("volumes.*.hostPath", "only other volumes", _off),
    _Control("securityContext.sysctls.*.name", "only safe sysctls", lambda v: v in _SAFE_SYSCTLS),
    *(_Control(f"{kind}.*.ports.*.hostPort", "none", _off) for kind in _KINDS),
    # Since 1.34 (pod-security-admission, check_hostProbesAndhostLifecycle.go).
    *(
        _Control(f"{kind}.*.{caller}.{action}.host", "none: the pod itself", _off)
        for kind in _KINDS
        for caller in _CALLERS
        for action in ("httpGet", "tcpSocket")
    ),
    *(
        control
        for where in _OF_CONTAINERS
        for control in (
            _Control(f"{where}.privileged", "false", _off),
            _Control(
                f"{where}.capabilities.add",
                "only " + ", ".join(sorted(_BASELINE_CAPABILITIES)),
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
# Pods with hostUsers: false may do what these forbid (UserNamespacesPodSecurityStandards).
_PROC_MOUNT = tuple(
    _Control(f"{where}.procMount", "Default", _one_of("Default")) for where in _OF_CONTAINERS
)
_NON_ROOT = (
    _Control("securityContext.runAsNonRoot", "true", lambda v: v is True),
    *(
        control
        for where in _ANYWHERE
        for control in (
            _Control(f"{where}.runAsNonRoot", "true", lambda v: v is not False),
            _Control(f"{where}.runAsUser", "any value except 0", lambda v: v is None or bool(v)),
        )
    ),
)
_RESTRICTED = (
    *_BASELINE,
    *_PROC_MOUNT,
    # A null in a template removes the default.
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
)


def apply_security(template: JsonObject, queue: TorchrunQueue) -> JsonObject:
    """Return the v1 PodTemplateSpec with default security contexts, after the check of its level.

    Raises:
        InvalidSpecError: it violates the level.
    """
    level = queue.spec.pod_security
    spec = object_at(template, "spec")
    if level == "restricted":
        pod = _set_defaults(spec, "securityContext", RESTRICTED_POD)
        pod |= {kind: _map_containers(spec[kind], partial(_restrict, pod)) for kind in _KINDS}
    else:
        pod = _set_defaults(spec, "securityContext", _POD)
        pod["containers"] = _map_containers(spec["containers"], _set_trainer_defaults)
    if level is not None:
        _check(pod, level, queue.metadata.name)
        _check_annotations(object_at(template, "metadata"), level, queue.metadata.name)
    return {**template, "spec": pod}


def _set_defaults(body: JsonObject, field: str, defaults: JsonObject) -> JsonObject:
    return {**body, field: merge({field: defaults}, {field: body.get(field) or {}})[field]}


def _map_containers(containers: JsonValue, secure: Callable[[JsonObject], JsonObject]) -> JsonValue:
    assert isinstance(containers, list)
    # The API server refuses items that are not containers.
    return [secure(item) if isinstance(item, dict) else item for item in containers]


def _set_trainer_defaults(container: JsonObject) -> JsonObject:
    """Leave containers of the user's templates as they are."""
    context = object_at(container, "securityContext")
    if container.get("name") != names.TRAINER_CONTAINER or context.get("privileged"):
        return container
    return _set_defaults(container, "securityContext", _TRAINER)


def _restrict(pod: JsonObject, container: JsonObject) -> JsonObject:
    restricted_container = _set_defaults(container, "securityContext", _RESTRICTED_CONTAINER)
    user = object_at(restricted_container, "securityContext").get("runAsUser")
    if user is None:
        user = object_at(pod, "securityContext").get("runAsUser")
    if container.get("name") != names.TRAINER_CONTAINER or user != RUNTIME_USER:
        return restricted_container
    env = merge({"env": [*_USER_VARIABLES]}, {"env": restricted_container["env"]})["env"]
    return {**restricted_container, "env": env}


def _check(spec: JsonObject, level: PodSecurity, queue: str) -> None:
    level_controls, of_host_users = (
        (_BASELINE, _PROC_MOUNT) if level == "baseline" else (_RESTRICTED, _NON_ROOT)
    )
    for control in (*level_controls, *(() if spec.get("hostUsers") is False else of_host_users)):
        for path, value in _values(spec, control.path):
            if not control.accepts(value):
                raise InvalidSpecError(
                    f"podTemplate.spec.{path} is {msgspec.json.encode(value).decode()[:80]}, but"
                    f" podSecurity {level} of TorchrunQueue {queue} accepts {control.accepted}."
                    " Change the podTemplate or choose another queue."
                )


def _check_annotations(meta: JsonObject, level: PodSecurity, queue: str) -> None:
    """Check the AppArmor profiles of older releases (check_appArmorProfile.go)."""
    for name, value in object_at(meta, "annotations").items():
        is_allowed = value in ("", "runtime/default") or str(value).startswith("localhost/")
        if name.startswith(_APPARMOR) and not is_allowed:
            raise InvalidSpecError(
                f"The annotation {name} of the pods is {value}, but podSecurity {level} of"
                f" TorchrunQueue {queue} accepts runtime/default or localhost/*. Change the"
                " annotation or choose another queue."
            )


def _values(body: JsonValue, path: str) -> Iterator[tuple[str, JsonValue]]:
    """Yield the values at a path, None for a missing one, with the path as users write it."""
    head, _, rest = path.partition(".")
    if head == "*":
        items = body if isinstance(body, list) else []
        entries = [(f"[{_name(item, index)}]", item) for index, item in enumerate(items)]
    else:
        entries = [(head, body.get(head) if isinstance(body, dict) else None)]
    for name, value in entries:
        if not rest:
            yield name, value
            continue
        for inner, end in _values(value, rest):
            yield f"{name}{'' if inner.startswith('[') else '.'}{inner}", end


def _name(item: JsonValue, index: int) -> JsonValue:
    return item.get("name", index) if isinstance(item, dict) else index


def _is_volume(volume: JsonValue) -> bool:
    return isinstance(volume, dict) and _VOLUMES.issuperset(volume.keys() - {"name"})
