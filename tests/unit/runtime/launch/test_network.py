"""What NCCL's log says about the network, and how the launcher reads it without a bound to break."""

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchrun_runtime.launch.gang.leader import TransportUse
from torchrun_runtime.launch.gang.messages import NcclTransport
from torchrun_runtime.launch.gang.policy import RestartLimits
from torchrun_runtime.launch.gang.rounds import GangNode, OrderInbox, OwnLink, Rounds
from torchrun_runtime.launch.network import (
    PIPE,
    NetworkLog,
    NetworkWatch,
    TransportFinder,
    open_network_log,
)
from torchrun_runtime.launch.output import copied_to
from unit.runtime.launch.nccl_lines import PREFIX, SAMPLES, Sample
from unit.runtime.launching import FOLDER

SOCKET = "Channel 00/0 : 1[0] -> 0[0] [receive] via NET/Socket/0"


@pytest.mark.parametrize("sample", SAMPLES, ids=lambda sample: sample.version)
def test_the_network_of_each_version(sample: Sample) -> None:
    finder = TransportFinder()
    for line in sample.lines:
        finder.read(PREFIX + line)
    assert finder.transport == (sample.transport and NcclTransport(*sample.transport))


def test_socket_wins_over_another_network_of_the_node() -> None:
    finder = TransportFinder()
    for line in (SOCKET.replace("Socket", "IB"), SOCKET, SOCKET.replace("Socket", "IB")):
        finder.read(PREFIX + line)
    assert finder.transport == NcclTransport("Socket")


@pytest.fixture
def log(tmp_path: Path) -> NetworkLog:
    """The log of a round. The test closes it, as the end of a command does."""
    log = open_network_log(str(tmp_path))
    assert log is not None
    return log


def write(folder: Path, *lines: str) -> None:
    """As NCCL: open to write, which waits for a reader, and write line by line."""
    with open(folder / PIPE, "w", buffering=1) as file:
        for line in lines:
            file.write(f"{line}\n")


def test_the_launcher_reads_what_many_processes_write_at_the_same_time(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], log: NetworkLog
) -> None:
    code = f"""
        with open({str(tmp_path / PIPE)!r}, "w", buffering=1) as file:
            for number in range(2000):
                file.write(f"h:1:1 [0] NCCL INFO Channel {{number}}/0 : 0[0] -> 1[1] via P2P/IPC\\n")
            file.write({PREFIX + SOCKET + chr(10)!r})
    """
    ranks = [subprocess.Popen([sys.executable, "-c", textwrap.dedent(code)]) for _ in range(4)]
    assert [rank.wait() for rank in ranks] == [0] * 4
    log.close()
    assert log.transport == NcclTransport("Socket")
    assert capfd.readouterr().err == ""


def test_warnings_are_lines_of_the_launcher_up_to_a_limit(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], log: NetworkLog
) -> None:
    warning = (
        "[2026-11-29 23:05:04] h:7:7 [0] init.cc:2955 (ncclCommInitRank) NCCL WARN Cuda failure"
    )
    write(tmp_path, "", warning, *[f"h:1:1 [0] a.cc:1 NCCL WARN {n}" for n in range(80)])
    log.close()
    lines = capfd.readouterr().err.splitlines()
    assert lines[0] == f"torchrun-launch: {warning}"
    assert lines[-1].endswith("more warnings of NCCL are not shown: set NCCL_DEBUG=WARN")
    assert len(lines) == 51


def test_no_line_of_any_kind_stops_the_reader(tmp_path: Path, log: NetworkLog) -> None:
    with open(tmp_path / PIPE, "wb") as file:
        file.write(b"\xff\x00" * 500_000 + b"\n" + b"x" * 200_000)
        file.write(b"\n" + (PREFIX + SOCKET).encode() + b"\n")
    log.close()
    assert log.transport == NcclTransport("Socket")


def test_a_log_that_cannot_be_copied_does_not_stop_the_reader(
    tmp_path: Path, log: NetworkLog
) -> None:
    def refuse(stream: int, data: bytes) -> None:
        raise ValueError("no room")

    with copied_to(refuse):
        write(tmp_path, "h:1:1 [0] a.cc:1 NCCL WARN 1", PREFIX + SOCKET)
        log.close()
    assert log.transport == NcclTransport("Socket")


def test_a_folder_without_named_pipes_has_no_log(tmp_path: Path) -> None:
    (tmp_path / PIPE).touch()
    assert open_network_log(str(tmp_path)) is None
    assert open_network_log(str(tmp_path / "missing")) is None


def test_the_watch_reports_the_network_of_its_node_once(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], log: NetworkLog
) -> None:
    inbox = OrderInbox()
    rounds = Rounds(OwnLink(GangNode(0, 1, "", 0, ""), RestartLimits(), inbox), inbox, lambda: None)
    announced: list[tuple[TransportUse, ...]] = []
    watch = NetworkWatch(rounds, log, lambda: announced.append(rounds.networks()))
    assert watch.check() is None
    assert announced == []
    write(tmp_path, PREFIX + "NET/Socket : Using [0]eth0:10.0.4.51<0>", PREFIX + SOCKET)
    log.close()
    assert (watch.check(), watch.check()) == (None, None)
    watch.on_stop(leaving=True)
    assert announced == [(TransportUse(NcclTransport("Socket", "eth0"), 1, 0),)]
    assert capfd.readouterr().err == "torchrun-launch: NCCL uses Socket over eth0\n"


# What a process asks NCCL for

TORCH = {
    "torch/__init__.py": "from torch import cuda\n",
    "torch/cuda/__init__.py": "",
    "torch/cuda/nccl.py": "def version(): return VERSION\n",
    "torch/distributed/__init__.py": "from .distributed_c10d import *\n",
    "torch/distributed/distributed_c10d.py": "def init_process_group(backend): pass\n",
}
PRINT = 'print({k: v for k, v in os.environ.items() if k.startswith("NCCL")})'


def variables(
    folder: Path, before: str = "", version: str = "(2, 22, 3)", **environment: str
) -> str:
    """The variables of NCCL in a process that has formed a group."""
    for name, text in TORCH.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text.replace("VERSION", version))
    script = f"import os\n{before}\nimport torch.distributed as dist\n"
    script += f'dist.init_process_group("nccl")\n{PRINT}'
    return subprocess.run(
        [sys.executable, "-c", script],
        env={
            "PATH": os.environ["PATH"],
            "HOME": str(folder),
            "PYTHONPATH": f"{FOLDER / 'rank'}:{folder}",
            "TORCHRUN_LAUNCH_REPORTS": str(folder),
            **environment,
        },
        check=True,
        capture_output=True,
        text=True,
    ).stdout.strip()


@pytest.fixture
def piped(tmp_path: Path) -> Path:
    """A folder with the pipe of a launcher."""
    os.mkfifo(tmp_path / PIPE)
    return tmp_path


def test_a_process_with_a_group_of_torch_asks_nccl_for_its_log(piped: Path) -> None:
    assert variables(piped) == str(
        {
            "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV",
            "NCCL_DEBUG_FILE": str(piped / PIPE),
            "NCCL_DEBUG": "INFO",
        }
    )


@pytest.mark.parametrize(
    ("name", "value"),
    [("NCCL_DEBUG", "WARN"), ("NCCL_DEBUG_SUBSYS", "COLL"), ("NCCL_DEBUG_FILE", "/tmp/%h.%p")],
)
@pytest.mark.parametrize("where", ["job", "script", "file", "named file"])
def test_what_the_user_has_set_stays(piped: Path, name: str, value: str, where: str) -> None:
    seen = str({name: value})
    if where == "job":
        assert variables(piped, **{name: value}) == seen
    elif where == "script":
        assert variables(piped, f"os.environ[{name!r}] = {value!r}") == seen
    elif where == "file":
        (piped / ".nccl.conf").write_text(f"{name}={value}\n")
        assert variables(piped) == "{}"
    else:
        (piped / "own").write_text(f"{name}={value}\n")
        own = str(piped / "own")
        assert variables(piped, NCCL_CONF_FILE=own) == str({"NCCL_CONF_FILE": own})


def test_nccl_that_would_print_its_version_is_not_asked(piped: Path) -> None:
    assert variables(piped, version="(2, 21, 5)") == "{}"


def test_torch_without_nccl_is_not_asked(piped: Path) -> None:
    assert variables(piped, version="(_ for _ in ()).throw(AttributeError())") == "{}"


def test_nothing_is_asked_without_a_launcher_that_reads(tmp_path: Path) -> None:
    assert variables(tmp_path) == "{}"
    (tmp_path / PIPE).touch()
    assert variables(tmp_path) == "{}"
