"""Settings of the controller, from flags and TORCHRUN_* environment variables.

A flag takes precedence. Every setting is one entry of `OPTIONS`: `listen_port` is the flag
--listen-port and the variable TORCHRUN_LISTEN_PORT. (Names of variables avoid what Kubernetes sets
for a Service called torchrun: TORCHRUN_PORT, TORCHRUN_SERVICE_HOST and the like.)
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, Literal, NoReturn

import msgspec
from msgspec import Struct

from torchrun_controller.leader.election import Durations
from torchrun_controller.logs import LogFormat, LogLevel
from torchrun_controller.metrics.per_job import MAX_JOBS
from torchrun_controller.reconcile.admission.nodes import parse_overhead
from torchrun_controller.setting_parsers import (
    ENDPOINT,
    IMAGE,
    NAME,
    SUBDOMAIN,
    base_url,
    boolean,
    existing_file,
    integer,
    ip_address,
    matching,
    name_list,
    one_of,
    seconds,
)

# https://kubernetes.io/docs/tasks/run-application/access-api-from-pod/
_OWN_NAMESPACE = Path("/var/run/secrets/kubernetes.io/serviceaccount/namespace")


class SettingsError(Exception):
    """A setting is invalid; the message is one line with name, value and accepted values."""


class Settings(Struct, frozen=True, kw_only=True):
    """The settings of a process; durations in seconds."""

    runtime_image: str
    runtime_image_pull_policy: Literal["Always", "IfNotPresent", "Never"]
    namespace: str  # "": all
    workers: int
    kubeconfig: str | None
    context: str | None
    leader_election: bool
    lease_name: str
    lease_namespace: str
    lease_durations: Durations
    listen_address: str  # "": every interface
    listen_port: int
    admit_by_nodes: bool
    cohort_namespaces: tuple[str, ...]
    kai_quota_namespaces: tuple[str, ...]
    node_overhead: dict[str, int]
    etcd_endpoint: str  # "": jobs name their own
    progress_url: str  # "": workers do not report
    progress_port: int
    docs_url: str  # "": messages have no links
    metrics_jobs: int
    log_level: LogLevel
    log_format: LogFormat
    uvloop: bool


class Option(Struct, frozen=True):
    """One setting. If `parse` raises ValueError or KeyError, the error message has `accepted`."""

    group: str
    name: str
    parse: Callable[[str], Any]
    accepted: str
    default: str | None  # None: required
    help: str

    @property
    def flag(self) -> str:
        """The flag, such as --listen-port."""
        return "--" + self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable, such as TORCHRUN_LISTEN_PORT."""
        return f"TORCHRUN_{self.name.upper()}"


_SECONDS = "a duration such as 15s, 500ms or 1m"
_NAMESPACES = "names of namespaces, separated by commas"
_SWITCH = "true or false"
_PODS, _CLUSTER = "pods and admission", "cluster"
_HA, _PROCESS, _PROGRESS = "leader election", "process", "progress of jobs"

OPTIONS: Final = (
    Option(
        _PODS,
        "runtime_image",
        matching(IMAGE),
        "an image such as registry.example.com/torchrun-runtime:1.0 (no registry is assumed)",
        None,
        "Image of sync and serve pods, and of the launcher, which the pods of a job copy from it.",
    ),
    Option(
        _PODS,
        "runtime_image_pull_policy",
        one_of("Always", "IfNotPresent", "Never"),
        "Always, IfNotPresent or Never",
        "IfNotPresent",
        "When the kubelet pulls the runtime image.",
    ),
    Option(
        _PODS,
        "admit_by_nodes",
        boolean,
        _SWITCH,
        "true",
        "Admit a gang only when the machines have room for it. Set it to false if an autoscaler "
        "adds machines for pending pods; then only quota decides.",
    ),
    Option(
        _PODS,
        "node_overhead",
        parse_overhead,
        "amounts such as cpu=2,memory=8Gi,pods=10",
        "",
        "Resources of each machine that DaemonSets and other pods use. Admission does not count "
        "them as free.",
    ),
    Option(
        _PODS,
        "etcd_endpoint",
        matching(ENDPOINT),
        "host:port, such as etcd.infra.svc:2379",
        "",
        "Rendezvous endpoint of jobs with rdzvBackend etcd or etcd-v2 that name none. Empty: they "
        "use the default backend, and the condition NotYetSupported says so.",
    ),
    Option(
        _PODS,
        "cohort_namespaces",
        name_list,
        _NAMESPACES,
        "",
        "Namespaces whose queues can share a cohort. Empty: each namespace has its own cohorts.",
    ),
    Option(
        _PODS,
        "kai_quota_namespaces",
        name_list,
        _NAMESPACES,
        "",
        "Namespaces whose queues can set the quota, weight and parent of their KAI queues. Other "
        "KAI queues have no guaranteed quota, a weight of at most 1 and the default parent.",
    ),
    Option(
        _CLUSTER,
        "namespace",
        lambda text: matching(NAME)(text) if text else "",
        "the name of a namespace",
        "",
        "Namespace to watch. Empty: all namespaces, which needs a ClusterRole.",
    ),
    Option(
        _CLUSTER,
        "kubeconfig",
        existing_file,
        "the path of a file",
        "",
        "Kubeconfig file. Empty: $KUBECONFIG, the pod's service account, or ~/.kube/config.",
    ),
    Option(
        _CLUSTER,
        "context",
        lambda text: text or None,
        "the name of a context",
        "",
        "Context of the kubeconfig. Empty: the current context.",
    ),
    Option(
        _HA,
        "leader_election",
        boolean,
        _SWITCH,
        "true",
        "Elect one of several replicas by a Lease. Disable it only if there is never a second "
        "replica.",
    ),
    Option(
        _HA,
        "lease_name",
        matching(SUBDOMAIN),
        "a lowercase DNS name",
        "torchrun-controller",
        "Name of the Lease.",
    ),
    Option(
        _HA,
        "lease_namespace",
        lambda text: matching(NAME)(text or _own_namespace()),
        "the name of a namespace",
        "",
        "Namespace of the Lease. Empty: the namespace of the pod, or `default` outside a cluster.",
    ),
    Option(
        _HA,
        "lease_duration",
        seconds,
        _SECONDS,
        "15s",
        "Time after the last renewal until a standby takes over. Must be longer than the renew "
        "deadline; the difference is the time that a write in flight has left.",
    ),
    Option(
        _HA,
        "lease_renew_deadline",
        seconds,
        _SECONDS,
        "10s",
        "Time without a renewal after which the leader stops.",
    ),
    Option(
        _HA,
        "lease_retry_period",
        seconds,
        _SECONDS,
        "2s",
        "Time between two attempts to renew or acquire the Lease.",
    ),
    Option(
        _PROCESS,
        "workers",
        integer(1, 1000),
        "an integer from 1 to 1000",
        "16",
        "Jobs that are reconciled at the same time.",
    ),
    Option(
        _PROCESS,
        "listen_address",
        ip_address,
        "an IP address",
        "",
        "Address for /metrics, /healthz and /readyz. Empty: all interfaces.",
    ),
    Option(
        _PROCESS,
        "listen_port",
        integer(0, 65535),
        "an integer from 0 to 65535",
        "8080",
        "Port for /metrics, /healthz and /readyz. 0: any free port.",
    ),
    Option(
        _PROGRESS,
        "progress_url",
        base_url,
        "a URL such as http://torchrun-controller.torchrun-system.svc:8081",
        "",
        "URL at which workers report progress and restarts in the same pods. Empty: they do not "
        "report, each failure starts a new gang, and no port is opened. A change affects later "
        "attempts only.",
    ),
    Option(
        _PROGRESS,
        "progress_port",
        integer(0, 65535),
        "an integer from 0 to 65535",
        "8081",
        "Port for reports of progress, on --listen-address. 0: any free port.",
    ),
    Option(
        _PROCESS,
        "docs_url",
        base_url,
        "a URL such as https://docs.example.com/torchrun",
        "",
        "Site of this documentation (`make docs`). The message and the event of a job that waits "
        "for somebody to act then end with a link to its reason. Empty: no link.",
    ),
    Option(
        _PROCESS,
        "metrics_jobs",
        integer(0, MAX_JOBS),
        f"an integer from 0 to {MAX_JOBS}",
        "0",
        "Maximum number of jobs whose progress has series in /metrics. 0: none.",
    ),
    Option(
        _PROCESS,
        "log_level",
        one_of("debug", "info", "warning", "error"),
        "debug, info, warning or error",
        "info",
        "Lowest level to log. To change it at run time, send PUT /loglevel from localhost.",
    ),
    Option(
        _PROCESS,
        "log_format",
        one_of("auto", "json", "console"),
        "auto, json or console",
        "auto",
        "Format of the log. auto: console on a terminal, else json.",
    ),
    Option(_PROCESS, "uvloop", boolean, _SWITCH, "true", "Use uvloop's faster event loop."),
)


def parse(argv: Sequence[str], environ: Mapping[str, str]) -> Settings:
    """Read the settings from flags and variables; an empty variable counts as not set.

    Raises SettingsError. --help prints and raises SystemExit(0).
    """
    flags = vars(_parser().parse_args(argv))
    values = {option.name: _value(option, flags[option.name], environ) for option in OPTIONS}
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


def _value(option: Option, flag: str | None, environ: Mapping[str, str]) -> Any:  # noqa: ANN401
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
        description="Run TorchrunJobs: watch them, and create and supervise their pods.",
        epilog="Each flag has an environment variable; the flag takes precedence. An invalid "
        "setting ends the process with one line and exit code 2.",
        allow_abbrev=False,
    )
    groups = {option.group: parser.add_argument_group(option.group) for option in OPTIONS}
    for option in OPTIONS:
        default = "required" if option.default is None else f"default: {option.default or 'empty'}"
        groups[option.group].add_argument(
            option.flag,
            nargs="?" if option.parse is boolean else None,
            const="true" if option.parse is boolean else None,
            metavar="BOOL" if option.parse is boolean else option.name.rpartition("_")[2].upper(),
            help=f"{option.help} [{option.variable}; {default}]",
        )
    return parser


def _own_namespace() -> str:
    try:
        return _OWN_NAMESPACE.read_text().strip()
    except OSError:
        return "default"
