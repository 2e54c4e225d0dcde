"""Settings of the controller, from flags and TORCHRUN_* environment variables; a flag wins.

Every setting is one line of `_OPTIONS`: `listen_port` is the flag --listen-port and the variable
TORCHRUN_LISTEN_PORT. (Names of variables avoid what Kubernetes sets for a Service called torchrun:
TORCHRUN_PORT, TORCHRUN_SERVICE_HOST and the like.)
"""

import argparse
import ipaddress
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn
from urllib.parse import urlsplit

import msgspec
from msgspec import Struct

from torchrun_controller.leader.election import Durations
from torchrun_controller.logs import LogFormat, LogLevel
from torchrun_controller.metrics.per_job import MOST_JOBS
from torchrun_controller.reconcile.admission.nodes import parse_overhead

# https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class SettingsError(Exception):
    """A setting is wrong; the message is one line with name, value and accepted values."""


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of a process; durations in seconds."""

    runtime_image: str
    runtime_image_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    namespaces: tuple[str, ...]  # empty: all
    workers: int
    kubeconfig: str | None
    context: str | None
    leader_election: bool
    lease_name: str
    lease_namespace: str
    lease_durations: Durations
    listen_address: str  # "": every interface
    listen_port: int
    grow_after: float
    admit_by_nodes: bool
    cohort_namespaces: tuple[str, ...]
    node_overhead: dict[str, int]
    progress_url: str  # "": workers do not report
    progress_port: int
    metrics_jobs: int
    log_level: LogLevel
    log_format: LogFormat
    uvloop: bool


class _Option(Struct, frozen=True):
    """One setting. `parse` raises ValueError; then the user sees `accepted`."""

    group: str
    name: str
    parse: Callable[[str], Any]
    accepted: str
    default: str | None  # None: required
    help: str

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        return f"TORCHRUN_{self.name.upper()}"


_NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
_SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
# https://github.com/distribution/reference: [host[:port]/]path[:tag][@digest]
_IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?"
)
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def _matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    def parse(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError
        return text

    return parse


def _one_of(*words: str) -> Callable[[str], str]:
    return _matching(re.compile("|".join(words)))


def _names(text: str) -> tuple[str, ...]:
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(_NAME.fullmatch(name) for name in names):
        raise ValueError
    return tuple(dict.fromkeys(names))


def _integer(low: int, high: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return parse


def _switch(text: str) -> bool:
    return {"true": True, "false": False}[text.lower()]


def _seconds(text: str) -> float:
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError
    return float(match[1]) * _UNITS[match[2] or ""]


def _path(text: str) -> str | None:
    if text and not Path(text).is_file():
        raise ValueError
    return text or None


def _address(text: str) -> str:
    if text:
        ipaddress.ip_address(text)
    return text


def _base_url(text: str) -> str:
    if text:
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
        if parts.query or parts.fragment or parts.username or parts.password:
            raise ValueError
    return text.rstrip("/")


_SECONDS = "a duration such as 15s, 500ms or 1m"
_NAMESPACES = "names of namespaces, separated by commas"
_SWITCH = "true or false"
_PODS, _CLUSTER = "pods that the controller makes", "cluster"
_HA, _PROCESS, _PROGRESS = "leader election", "process", "progress of jobs"

_OPTIONS: Final = (
    _Option(
        _PODS,
        "runtime_image",
        _matching(_IMAGE),
        "an image such as registry.example.com/torchrun-runtime:1.0 (no registry is assumed)",
        None,
        "Image of the sync pods and of the launcher that is copied into the training pods. "
        "There is no default.",
    ),
    _Option(
        _PODS,
        "runtime_image_pull_policy",
        _one_of("Always", "IfNotPresent", "Never"),
        "Always, IfNotPresent or Never",
        "IfNotPresent",
        "When the kubelet pulls the runtime image.",
    ),
    _Option(
        _PODS,
        "grow_after",
        _seconds,
        _SECONDS,
        "5m",
        "Age at which a gang of an elastic job may give way to a larger one; growth costs as "
        "much as a restart.",
    ),
    _Option(
        _PODS,
        "admit_by_nodes",
        _switch,
        _SWITCH,
        "true",
        "Whether a gang is admitted only once nodes have room for it; false where nodes come when "
        "pods wait for them (cluster autoscaler): then quota alone decides.",
    ),
    _Option(
        _PODS,
        "node_overhead",
        parse_overhead,
        "amounts such as cpu=2,memory=8Gi,pods=10",
        "",
        "What DaemonSets and other pods take of each node: admission counts no room there.",
    ),
    _Option(
        _PODS,
        "cohort_namespaces",
        _names,
        _NAMESPACES,
        "",
        "Namespaces whose queues may be of one cohort. Empty: each namespace has its own cohorts.",
    ),
    _Option(
        _CLUSTER,
        "namespaces",
        _names,
        _NAMESPACES,
        "",
        "Namespaces to work in, such as team-a,team-b. Empty: all, which needs a ClusterRole.",
    ),
    _Option(
        _CLUSTER,
        "kubeconfig",
        _path,
        "the path of a file",
        "",
        "Kubeconfig file. Empty: $KUBECONFIG, the pod's service account, or ~/.kube/config.",
    ),
    _Option(
        _CLUSTER,
        "context",
        lambda text: text or None,
        "the name of a context",
        "",
        "Context of the kubeconfig. Empty: its current one.",
    ),
    _Option(
        _HA,
        "leader_election",
        _switch,
        _SWITCH,
        "true",
        "Let one of several replicas work, by a Lease. Off only where there is never a second.",
    ),
    _Option(
        _HA,
        "lease_name",
        _matching(_SUBDOMAIN),
        "a DNS name in lower case",
        "torchrun-controller",
        "Name of the Lease.",
    ),
    _Option(
        _HA,
        "lease_namespace",
        lambda text: _matching(_NAME)(text or _own_namespace()),
        "the name of a namespace",
        "",
        "Namespace of the Lease. Empty: the pod's own, outside of a cluster `default`.",
    ),
    _Option(
        _HA,
        "lease_duration",
        _seconds,
        _SECONDS,
        "15s",
        "How long a standby lets a silent leader be. Must be longer than the renew deadline; the "
        "difference is what a write on its way has left.",
    ),
    _Option(
        _HA,
        "lease_renew_deadline",
        _seconds,
        _SECONDS,
        "10s",
        "A leader that cannot renew for so long stops.",
    ),
    _Option(
        _HA,
        "lease_retry_period",
        _seconds,
        _SECONDS,
        "2s",
        "Time between two renewals, or two tries.",
    ),
    _Option(
        _PROCESS,
        "workers",
        _integer(1, 1000),
        "a whole number from 1 to 1000",
        "16",
        "Jobs that are reconciled at the same time.",
    ),
    _Option(
        _PROCESS,
        "listen_address",
        _address,
        "an IP address",
        "",
        "Where /metrics, /healthz and /readyz are served. Empty: every interface.",
    ),
    _Option(
        _PROCESS,
        "listen_port",
        _integer(0, 65535),
        "a whole number from 0 to 65535",
        "8080",
        "Port of the same; 0 takes a free one.",
    ),
    _Option(
        _PROGRESS,
        "progress_url",
        _base_url,
        "a URL such as http://torchrun-controller.torchrun-system.svc:8081",
        "",
        "Where workers reach this controller to report their progress. Empty: they do not report "
        "and no port is opened. Jobs that are running take no notice of a change.",
    ),
    _Option(
        _PROGRESS,
        "progress_port",
        _integer(0, 65535),
        "a whole number from 0 to 65535",
        "8081",
        "Port on which they are heard, on every interface or --listen-address; 0 takes a free one.",
    ),
    _Option(
        _PROCESS,
        "metrics_jobs",
        _integer(0, MOST_JOBS),
        f"a whole number from 0 to {MOST_JOBS}",
        "0",
        "Jobs that have series of their own in /metrics, under their names; 0: none.",
    ),
    _Option(
        _PROCESS,
        "log_level",
        _one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error",
        "info",
        "Least level that is logged. At run time, from localhost: PUT /loglevel.",
    ),
    _Option(
        _PROCESS,
        "log_format",
        _one_of("auto", "json", "console"),
        "auto, json or console",
        "auto",
        "auto: console on a terminal, else json.",
    ),
    _Option(_PROCESS, "uvloop", _switch, _SWITCH, "true", "Use uvloop's faster event loop."),
)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read settings; an empty variable counts as not set.

    Raises SettingsError. --help prints and raises SystemExit(0).
    """
    flags = vars(_parser().parse_args(argv))
    values = {option.name: _value(option, flags[option.name], environ) for option in _OPTIONS}
    lease = [values.pop(f"lease_{part}") for part in ("duration", "renew_deadline", "retry_period")]
    try:
        durations = Durations(*lease)
    except ValueError as error:
        texts = "/".join(f"{seconds:g}s" for seconds in lease)
        raise SettingsError(
            "--lease-duration/--lease-renew-deadline/--lease-retry-period "
            f"(TORCHRUN_LEASE_*) are {texts}: {error}"
        ) from None
    return msgspec.convert({**values, "lease_durations": durations}, Settings)


def _value(option: _Option, flag: str | None, environ: Mapping[str, str]) -> Any:  # noqa: ANN401
    text = flag if flag is not None else environ.get(option.variable) or option.default
    where = f"{option.flag} ({option.variable})"
    if text is None:
        raise SettingsError(f"{where} is not set: it must be {option.accepted}")
    try:
        return option.parse(text.strip())
    except (ValueError, KeyError):
        raise SettingsError(f"{where} is {text!r}: it must be {option.accepted}") from None


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise SettingsError(f"{message}; see --help")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="torchrun-controller",
        description="Runs TorchrunJobs: watches them, and makes and minds their pods.",
        epilog="Every flag may be given as an environment variable instead; a flag wins. A wrong "
        "setting ends the start with one line and exit code 2.",
        allow_abbrev=False,
    )
    groups = {option.group: parser.add_argument_group(option.group) for option in _OPTIONS}
    for option in _OPTIONS:
        default = "required" if option.default is None else f"default: {option.default or 'empty'}"
        groups[option.group].add_argument(
            option.flag,
            nargs="?" if option.parse is _switch else None,
            const="true" if option.parse is _switch else None,
            metavar="BOOL" if option.parse is _switch else option.name.rpartition("_")[2].upper(),
            help=f"{option.help} [{option.variable}; {default}]",
        )
    return parser


def _own_namespace() -> str:
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"
