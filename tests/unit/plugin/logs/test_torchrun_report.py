"""torchrun's reports are one line in printed and followed logs, and complete with --raw."""

import pytest

from kubectl_torchrun.logs.torchrun_report import ReportFolder, StampedLine

from ..laptop import Laptop

USER = [
    b"step 3",
    b"Traceback (most recent call last):",
    b'  File "/workspace/train.py", line 7, in <module>',
    b"    loss.backward()",
    b"ValueError: bad batch",
]
AGENT_LOG = [
    b"W1122 01:24:22.407000 42 site-packages/torch/distributed/elastic/multiprocessing/api.py:1029]"
    b" Sending process 56 closing signal SIGTERM",
    b"E1122 01:24:22.512000 42 site-packages/torch/distributed/elastic/multiprocessing/api.py:1002]"
    b" failed (exitcode: 1) local_rank: 0 (pid: 55) of binary: /usr/bin/python3",
]
AGENT_TRACEBACK = [
    b"Traceback (most recent call last):",
    b'  File "/usr/local/bin/torchrun", line 8, in <module>',
    b"    sys.exit(main())",
    b"             ^^^^^^",
    b'  File "site-packages/torch/distributed/elastic/multiprocessing/errors/__init__.py", line 384',
    b"    result = f(*args, **kwargs)",
    b'  File "site-packages/torch/distributed/run.py", line 1138, in main',
    b"    run(args)",
    b'  File "site-packages/torch/distributed/run.py", line 1129, in run',
    b"    elastic_launch(",
    b'  File "site-packages/torch/distributed/launcher/api.py", line 386, in launch_agent',
    b"    raise ChildFailedError(",
]
# The text of ChildFailedError in torch 2.15.
CHILD_FAILED = [
    b"torch.distributed.elastic.multiprocessing.errors.ChildFailedError: ",
    b"=" * 60,
    b"train.py FAILED",
    b"-" * 60,
    b"Failures:",
    b"[1]:",
    b"  time      : 2026-11-23_08:30:11",
    b"  host      : localhost",
    b"  rank      : 1 (local_rank: 1)",
    b"  exitcode  : -15 (pid: 56)  (SIGTERM)",
    b"  error_file: <N/A>",
    b"  traceback : Signal 15 (SIGTERM) received by PID 56",
    b"-" * 60,
    b"Root Cause (first observed failure):",
    b"[0]:",
    b"  time      : 2026-11-23_08:30:10",
    b"  host      : localhost",
    b"  rank      : 0 (local_rank: 0)",
    b"  exitcode  : 1 (pid: 55) ",
    b"  error_file: <N/A>",
    b"  traceback : To enable traceback see: https://pytorch.org/docs/stable/elastic/errors.html",
    b"=" * 60,
]
REPORT = [*AGENT_LOG, *AGENT_TRACEBACK, *CHILD_FAILED]
FOLDED = (
    b"torchrun: ChildFailedError: rank 0 exited with code 1 (36 lines folded, --raw shows them)"
)
STOPPED = [
    b"W1122 01:24:22.407000 42 site-packages/torch/distributed/elastic/agent/server/api.py:725]"
    b" Received Signals.SIGTERM death signal, shutting down workers",
    AGENT_LOG[0],
    *AGENT_TRACEBACK[:-1],
    b"torch.distributed.elastic.multiprocessing.api.SignalException: Process 42 got signal: 15",
]
_AGENT = b"E1129 12:48:43.401000 45 torch/distributed/elastic/agent/server/api.py:1007] "
EXIT_BARRIER = [
    _AGENT + b"Error waiting on exit barrier. Elapsed: 0.013 seconds",
    _AGENT + b"Traceback (most recent call last):",
    _AGENT + b'  File "torch/distributed/elastic/agent/server/api.py", line 993, in _exit_barrier',
    _AGENT + b"torch.distributed.DistNetworkError: Failed to recv, got 0 bytes.",
]
STORE_LOG = [
    b"[W1129 12:48:43.863281728 TCPStore.cpp:125] [c10d] recvValue failed on SocketImpl(fd=4): ...",
    b"Exception raised from recvBytes at Utils.hpp:786 (most recent call first):",
    b"frame #0: c10::Error::Error(c10::SourceLocation) + 0x9d (0x7f9f in libc10.so)",
    b"<omitting python frames>",
    b"frame #31: _start + 0x21 (0x558a in python)",
    b"",
]
PASSED = b"torchrun: stopped waiting for the other nodes after the success of its ranks"


def fold(lines: list[bytes]) -> list[bytes]:
    """The lines as they are printed."""
    folder = ReportFolder()
    printed = [line for text in lines for line in folder.feed(StampedLine(b"", text))]
    return [line.text for line in [*printed, *folder.release()]]


@pytest.mark.parametrize(
    ("lines", "printed"),
    [
        pytest.param([*USER, *REPORT], [*USER, FOLDED], id="after the user's traceback"),
        pytest.param([*REPORT, b"next"], [FOLDED, b"next"], id="before another line"),
        pytest.param(
            [*AGENT_TRACEBACK, *CHILD_FAILED],
            [FOLDED.replace(b"36", b"34")],
            id="without messages of the agent",
        ),
        pytest.param(
            [*USER[:2], *USER[1:], *REPORT],
            [*USER[:2], *USER[1:], FOLDED],
            id="two ranks whose tracebacks are mixed",
        ),
        pytest.param(
            [*REPORT[:5], b"[default1]:ValueError: bad batch", *REPORT[5:]],
            [b"[default1]:ValueError: bad batch", FOLDED],
            id="a line of a rank within the report",
        ),
        pytest.param(
            STOPPED,
            [
                b"torchrun: SignalException: stopped by signal 15 (14 lines folded, --raw shows them)"
            ],
            id="an agent that was stopped",
        ),
        pytest.param(
            [line.replace(b"exitcode  : 1 (", b"exitcode  : -9 (") for line in REPORT],
            [FOLDED.replace(b"exited with code 1", b"was killed by signal 9")],
            id="a rank that was killed",
        ),
        pytest.param(
            [line for line in REPORT if not line.startswith(b"  rank")],
            [b"torchrun: ChildFailedError (34 lines folded, --raw shows them)"],
            id="a report without ranks",
        ),
        pytest.param(
            [b"step 3", *EXIT_BARRIER],
            [b"step 3", PASSED + b" (4 lines folded, --raw shows them)"],
            id="an exit barrier that timed out",
        ),
        pytest.param(
            [*STORE_LOG, *EXIT_BARRIER, b"torchrun-launch: next"],
            [PASSED + b" (10 lines folded, --raw shows them)", b"torchrun-launch: next"],
            id="an exit barrier without its store",
        ),
        pytest.param(
            [AGENT_LOG[0], *EXIT_BARRIER],
            [AGENT_LOG[0], PASSED + b" (4 lines folded, --raw shows them)"],
            id="an exit barrier after another message of the agent",
        ),
    ],
)
def test_a_report_is_one_line(lines: list[bytes], printed: list[bytes]) -> None:
    assert fold(lines) == printed


@pytest.mark.parametrize(
    "lines",
    [
        pytest.param(USER, id="the user's traceback"),
        pytest.param(USER[:3], id="a traceback that is cut"),
        pytest.param([AGENT_LOG[0], b"rank 1 saves a checkpoint"], id="a rank that is stopped"),
        pytest.param(REPORT[:-1], id="a report that is cut"),
        pytest.param([*STORE_LOG, *USER], id="a store that a rank has lost"),
        pytest.param([*STORE_LOG, b"step 4", AGENT_LOG[1]], id="a rank that goes on"),
        pytest.param([*AGENT_TRACEBACK, CHILD_FAILED[0], b"no table"], id="no table"),
        pytest.param([*USER[:2], *[b"  a frame"] * 3000, *USER[3:]], id="longer than any report"),
        pytest.param([b"=" * 60, b"epoch 1", b"=" * 60], id="a table of the user"),
    ],
)
def test_other_lines_are_printed_unchanged(lines: list[bytes]) -> None:
    assert fold(lines) == lines


def test_a_line_that_cannot_be_of_a_report_is_not_held() -> None:
    folder = ReportFolder()
    for text in (b"step 1", b"ValueError: bad batch", b"[1]:", b"[rank1]: Traceback (most recent"):
        assert folder.feed(StampedLine(b"1", text)) == [StampedLine(b"1", text)]


def test_a_report_without_a_table_is_released_at_once() -> None:
    lines = [*AGENT_TRACEBACK, CHILD_FAILED[0], b"no table"]
    folder = ReportFolder()
    printed = [line.text for text in lines for line in folder.feed(StampedLine(b"", text))]
    assert printed == lines


def stamped(lines: list[bytes]) -> list[str]:
    """The lines as the kubelet sends them, a millisecond apart."""
    return [
        f"2026-01-01T00:00:00.{at:03}000000Z {line.decode()}\n" for at, line in enumerate(lines)
    ]


@pytest.fixture
def failed(laptop: Laptop) -> Laptop:
    """A job that failed on its only node."""
    laptop.job("run", status={"phase": "Failed"})
    laptop.worker("run", 0, 0, *stamped([*USER, *REPORT]), terminated={"exitCode": 1})
    return laptop


def lines_of(output: str) -> list[bytes]:
    return [line.removeprefix("[0] ").encode() for line in output.splitlines()]


@pytest.mark.long
@pytest.mark.parametrize("follow", [(), ("--follow",)])
def test_logs_end_with_the_traceback_of_the_user(failed: Laptop, follow: tuple[str, ...]) -> None:
    assert lines_of(failed.run("logs", "run", *follow).stdout) == [*USER, FOLDED]
    raw = failed.run("logs", "run", "--raw", *follow).stdout
    assert lines_of(raw) == [*USER, *REPORT]


@pytest.mark.long
def test_tail_counts_printed_lines(failed: Laptop) -> None:
    assert lines_of(failed.run("logs", "run", "--tail", "2").stdout) == [USER[-1], FOLDED]
    assert lines_of(failed.run("logs", "run", "--tail", "2", "--raw").stdout) == REPORT[-2:]


@pytest.mark.long
def test_the_folded_line_has_a_time(failed: Laptop) -> None:
    shown = failed.run("logs", "run", "--timestamps", "--tail", "1").stdout
    assert shown == f"[0] 2026-01-01T00:00:00.040000000Z {FOLDED.decode()}\n"
