"""The exit codes of every program of the project, each declared once.

The controller, the plugin, and sync and serve pods import the constants. The launcher can import
none of them: `make generate` writes its constants to runtime/torchrun_runtime/launch/contract.py,
and docs/exit-codes.md from the tables below (see `exit_code_reference`).
"""

from typing import NamedTuple

SIGNAL_BASE = 128  # a process that a signal ended: 128 + number, as in a shell

# kubectl torchrun.
SUCCEEDED = 0
RUN_FAILED = 1
USAGE = 2
UPLOAD_FAILED = 3
CLUSTER = 4
TIMED_OUT = 5
REPEATED_FAILURE = 6
DETACHED = SIGNAL_BASE + 2  # SIGINT
CLOSED_PIPE = SIGNAL_BASE + 13  # SIGPIPE

# torchrun-controller.
LOST_LEASE = 1
UNUSABLE = 2  # a setting, the kubeconfig, the port
CRASHED = 70  # EX_SOFTWARE of sysexits.h

# The launcher.
SETUP_FAILED = 1
PYTHON_TOO_OLD = 78  # EX_CONFIG of sysexits.h
SDK_RAISED = 86  # a function of the SDK raised an exception
HUNG = 124  # as of timeout(1)
LAUNCH_FAILED = 125  # as of container runtimes: a failure of their own, not of the command
NOT_EXECUTABLE = 126  # as of a shell
NOT_FOUND = 127
STOPPED = SIGNAL_BASE + 15  # SIGTERM

# torchrun-sync and torchrun-serve.
SYNC_FAILED = 1
SERVE_FAILED = 1


class ExitStatus(NamedTuple):
    """An exit code, or a range of them, of one program.

    reasons: in the termination message, and so in `status.lastFailure` or in a condition.
    counted: whether `maxRestarts` counts a gang whose first failure has this code and reason; None
    for a program that is not part of a gang, and for a success. It is text of the docs: the
    controller decides in `reconcile/gang/restarts.py`, and a test compares the two.
    permanent: no restart corrects it, so the job fails at once.
    """

    codes: range
    meaning: str
    reasons: tuple[str, ...] = ()
    counted: bool | None = None
    permanent: bool = False


def _only(code: int) -> range:
    return range(code, code + 1)


PLUGIN = (
    ExitStatus(
        _only(SUCCEEDED),
        "Success. If the command follows a run (`submit`, `run`, `logs -f`, `status --watch`): the "
        "run succeeded.",
    ),
    ExitStatus(
        _only(RUN_FAILED),
        "The run failed, exceeded its deadline, cannot run as specified, or was deleted. `doctor`: "
        "a check failed. `cancel`: some of the jobs do not exist.",
    ),
    ExitStatus(
        _only(USAGE),
        "Invalid usage. Nothing was changed.",
    ),
    ExitStatus(
        _only(UPLOAD_FAILED),
        "The job exists but did not get the upload: it waits, or continues with its current code. "
        "Continue with `kubectl torchrun sync`.",
    ),
    ExitStatus(_only(CLUSTER), "The cluster is unreachable or refused the request."),
    ExitStatus(_only(TIMED_OUT), "`--timeout` expired. The request itself stays in effect."),
    ExitStatus(
        _only(REPEATED_FAILURE),
        "`run` or `submit` suspended the job, because its attempts repeat the same failure. See "
        "`--stop-on-repeated-failure`.",
    ),
    ExitStatus(
        _only(DETACHED),
        "Interrupted by Ctrl-C, or `cancel` was not confirmed. The job continues, unless a second "
        "Ctrl-C of `run` deleted it.",
    ),
    ExitStatus(_only(CLOSED_PIPE), "The reader of the output closed the pipe, for example `head`."),
)

CONTROLLER = (
    ExitStatus(_only(0), "Stopped by SIGTERM or SIGINT."),
    ExitStatus(
        _only(LOST_LEASE),
        "The replica lost the Lease. The kubelet restarts it as a standby.",
    ),
    ExitStatus(
        _only(UNUSABLE),
        "A setting or the kubeconfig is invalid, or a port is in use. The last line of the log "
        "names it.",
    ),
    ExitStatus(_only(CRASHED), "A bug. The log has the traceback."),
    ExitStatus(
        range(SIGNAL_BASE + 1, SIGNAL_BASE + 65),
        "128 + the number of a signal: a second SIGTERM or SIGINT, or one before the start was "
        "complete.",
    ),
)

LAUNCHER = (
    ExitStatus(_only(0), "The command succeeded."),
    ExitStatus(
        range(1, 256),
        "The rank that failed first raised an exception. Under torchrun this is the rank's exit "
        "code, not torchrun's.",
        ("Exception",),
        True,
    ),
    ExitStatus(
        range(1, 256),
        "The rank that failed first, or the command, ended with this code without an exception.",
        ("ExitCode",),
        True,
    ),
    ExitStatus(
        _only(PYTHON_TOO_OLD),
        "`python3` of the image is too old.",
        ("PythonTooOld",),
        permanent=True,
    ),
    ExitStatus(
        _only(SDK_RAISED),
        "A function of the [SDK](../sdk/README.md) raised an exception. The job fails, whatever "
        "its `max_restarts`.",
        ("ExitCode",),
        True,
    ),
    ExitStatus(
        _only(HUNG),
        "A node had no progress report and no output for `hangTimeoutSeconds`.",
        ("Hung",),
        True,
    ),
    ExitStatus(
        _only(LAUNCH_FAILED),
        "The command did not start.",
        (
            "ChannelFailed",
            "EnvironmentNotReady",
            "LaunchFailed",
            "MasterNotResolved",
            "WorkingDirMissing",
            "WorkspaceCopyFailed",
            "WorkspaceNotReady",
        ),
        True,
    ),
    ExitStatus(
        _only(LAUNCH_FAILED),
        "The command cannot run with this image or these settings.",
        ("InvalidCommand", "InvalidSetting", "TorchMissing"),
        permanent=True,
    ),
    ExitStatus(
        _only(LAUNCH_FAILED),
        "The command ended with 0, but it did not train on all nodes together, or a Python still "
        "ran in the background.",
        ("NotDistributed", "LeftInBackground"),
        permanent=True,
    ),
    ExitStatus(
        _only(LAUNCH_FAILED),
        "The launcher did not start its ranks, or killed them, because of a newer gang, failing "
        "storage or a lost machine.",
        ("Fenced", "FenceUnproven"),
        False,
    ),
    ExitStatus(
        _only(NOT_EXECUTABLE), "The program cannot be executed.", ("CommandNotExecutable",), True
    ),
    ExitStatus(
        _only(NOT_FOUND),
        "The program or the script does not exist.",
        ("CommandNotFound",),
        permanent=True,
    ),
    ExitStatus(
        range(SIGNAL_BASE + 1, SIGNAL_BASE + 65),
        "128 + the number of the signal that ended the rank or the command.",
        ("Signaled",),
        True,
    ),
    ExitStatus(
        _only(SIGNAL_BASE + 9),
        "The kernel killed a rank because the container exceeded its memory limit.",
        ("OOMKilled",),
        True,
    ),
    ExitStatus(
        _only(STOPPED),
        "A rank on another node failed, so the launcher killed the ranks of this node.",
        ("PeerFailed",),
        True,
    ),
    ExitStatus(
        _only(STOPPED),
        "The launcher received SIGTERM or SIGINT, and forwarded it or let the ranks stop together. "
        "Ranks that then exit with 0 do not change the code.",
        ("Stopped",),
        True,
    ),
    ExitStatus(
        _only(STOPPED),
        "All ranks stopped together, because the pod of another node was asked to end.",
        ("PeerStopped",),
        False,
    ),
)

# Of a gang: no restart corrects them.
PERMANENT = frozenset(reason for each in LAUNCHER if each.permanent for reason in each.reasons)

SETUP = (
    ExitStatus(
        _only(0), "The Python environment of `requirements` and `setupCommand` is complete."
    ),
    ExitStatus(
        range(SETUP_FAILED, 256),
        "The exit code of pip or of `setupCommand`, or 128 + the signal that ended it. 1 if pip is "
        "missing or `requirements` is invalid, 127 if a program does not exist.",
        ("SetupFailed",),
    ),
)

SYNC = (
    ExitStatus(_only(0), "The workspace is complete."),
    ExitStatus(
        _only(SYNC_FAILED),
        "The workspace is not complete. The termination message has the reason and whether a retry "
        "can help.",
    ),
    ExitStatus(
        _only(STOPPED),
        "Stopped by SIGTERM or SIGINT. An upload continues in the next pod.",
        ("Terminated",),
    ),
)

SERVE = (
    ExitStatus(_only(0), "Stopped by SIGTERM or SIGINT."),
    ExitStatus(_only(SERVE_FAILED), "A setting is invalid."),
)

# Constants of the launcher's module.
LAUNCHER_CONSTANTS = (
    "SETUP_FAILED",
    "SDK_RAISED",
    "HUNG",
    "LAUNCH_FAILED",
    "NOT_EXECUTABLE",
    "NOT_FOUND",
    "STOPPED",
)
