"""The output of the command: passed on unchanged, and copied to the storage of the job."""

import os
import re
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from torchrun_runtime.launch.streams import Copy
from unit.runtime.launching import Launcher, changed

# At the end, the launcher waits for a busy machine: for the output, or also for its copy.
OUTPUT = {"streams.py": {"_CLOSE_SECONDS = 2.0": "_CLOSE_SECONDS = 300.0"}}
ALL = {**OUTPUT, "launcher.py": {"_COPY_SECONDS = 2.0": "_COPY_SECONDS = 300.0"}}

MARK = re.compile(rb"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{9}Z) (stdout|stderr) F ")


def plain(copy: bytes) -> bytes:
    """The lines of a copy without the timestamp and stream that each must have."""
    lines = copy.splitlines(keepends=True)
    assert all(MARK.match(line) for line in lines)
    return b"".join(MARK.sub(b"", line, count=1) for line in lines)


def hanging_copy(directory: Path) -> tuple[Copy, Path]:
    """A copy to storage that does not answer, and its file: a named pipe without a reader."""
    (directory / "logs/0").mkdir(parents=True)
    file = directory / "logs/0/node-0.log"
    os.mkfifo(file)
    return Copy(str(directory), "0", "0", file_bytes=1 << 30), file


def read_to_end(copy: Copy, file: Path) -> bytes:
    """Let the storage answer, and close the copy. Returns the lines that were written."""
    written: list[bytes] = []
    reader = threading.Thread(target=lambda: written.append(file.read_bytes()))
    reader.start()
    copy.close(120)
    reader.join(120)
    return plain(written[0])


def state(launcher: Launcher, attempt: str = "0", node: str = "0") -> "dict[str, str]":
    directory = launcher.directory / "state"
    directory.mkdir(exist_ok=True)
    return {
        "TORCHRUN_STATE_DIR": str(directory),
        "TORCHRUN_ATTEMPT": attempt,
        "NODE_RANK": node,
    }


@pytest.mark.long
def test_output_is_copied_and_the_streams_stay_apart(launcher: Launcher) -> None:
    result = changed(launcher, ALL).run(
        "echo out; echo err >&2; exit 3", **state(launcher, "4", "2")
    )
    assert (result.exit_code, result.out) == (3, "out\n")
    assert "err\n" in result.err
    copy = (
        plain((launcher.directory / "state/logs/4/node-2.log").read_bytes()).decode().splitlines()
    )
    assert {"out", "err"} < set(copy)
    assert copy[-1].startswith("torchrun-launch: failed with exit code 3")


@pytest.mark.long
def test_output_is_copied_without_delay(launcher: Launcher) -> None:
    """Also colours and incomplete lines, before the command continues."""
    launched = launcher.start("printf '\\033[1mhalf'; read answer; :", **state(launcher))
    assert launched.process.stdout
    os.set_blocking(launched.process.stdout.fileno(), True)
    assert os.read(launched.process.stdout.fileno(), 100) == b"\x1b[1mhalf"
    launched.stop()
    launched.end()


@pytest.mark.long
def test_large_output_is_copied_completely(launcher: Launcher) -> None:
    result = changed(launcher, ALL).run("seq 1 300000", **state(launcher))
    numbers = "".join(f"{n}\n" for n in range(1, 300001))
    assert result.out == numbers
    copy = (launcher.directory / "state/logs/0/node-0.log").read_bytes()
    assert plain(copy).decode() == numbers


@pytest.mark.long
@pytest.mark.parametrize("broken", ["absent", "no directory", "full"])
def test_broken_storage_affects_the_copy_only(launcher: Launcher, broken: str) -> None:
    settings = state(launcher)
    folder = Path(settings["TORCHRUN_STATE_DIR"])
    if broken == "absent":
        settings["TORCHRUN_STATE_DIR"] = "/proc/none"
    elif broken == "no directory":
        settings["TORCHRUN_STATE_DIR"] = "/etc/passwd"
    else:
        (folder / "logs/0").mkdir(parents=True)
        (folder / "logs/0/node-0.log").symlink_to("/dev/full")
    result = changed(launcher, ALL).run("echo trained", **settings)
    assert (result.exit_code, result.out) == (0, "trained\n")
    said = "cannot copy this log" if broken == "full" else "running without the state directory"
    assert result.err.count(said) == 1


@pytest.mark.long
def test_hanging_storage_delays_nothing(launcher: Launcher) -> None:
    settings = state(launcher)
    folder = Path(settings["TORCHRUN_STATE_DIR"]) / "logs/0"
    folder.mkdir(parents=True)
    os.mkfifo(folder / "node-0.log")  # opening it for writing blocks: there is no reader
    lines = "head -c 20000000 /dev/zero | tr '\\0' '\\n'"
    result = changed(launcher, OUTPUT).run(lines, **settings)  # the copy never ends
    assert (result.exit_code, len(result.out)) == (0, 20_000_000)
    assert result.err.count("is too slow") == 1


@pytest.mark.long
def test_without_listeners_the_command_keeps_the_containers_streams(launcher: Launcher) -> None:
    with_pipes = launcher.run("readlink /proc/$$/fd/1; :", **state(launcher)).out
    direct = launcher.run("readlink /proc/$$/fd/1; readlink /proc/$PPID/fd/1").out.split()
    assert direct[0] == direct[1]
    assert with_pipes not in direct


def test_copies_of_the_last_five_attempts_stay(tmp_path: Path) -> None:
    for attempt in range(8):
        (tmp_path / f"logs/{attempt}").mkdir(parents=True)
    copy = Copy(str(tmp_path), "7", "0")
    copy.add(1, b"hello\n")
    copy.close(120)
    assert sorted(os.listdir(tmp_path / "logs")) == ["3", "4", "5", "6", "7"]


def test_a_copy_keeps_the_newest_part(tmp_path: Path) -> None:
    copy = Copy(str(tmp_path), "0", "1", file_bytes=1000)
    for number in range(500):
        copy.add(1, b"%07d\n" % number)
    copy.close(120)
    newest = (tmp_path / "logs/0/node-1.log").read_bytes()
    before = (tmp_path / "logs/0/node-1.log.1").read_bytes()
    assert len(newest) <= 1000 == len(before)
    whole = b"".join(b"%07d\n" % number for number in range(500))
    _, newline, rest = (before + newest).partition(b"\n")
    assert newline
    assert whole.endswith(plain(rest))


def test_streams_are_mixed_at_line_ends_only(tmp_path: Path) -> None:
    copy = Copy(str(tmp_path), "0", "0")
    copy.add(1, b"one ")
    copy.add(2, b"error\nhalf")
    copy.add(1, b"line\n")
    copy.close(120)
    written = (tmp_path / "logs/0/node-0.log").read_bytes()
    assert plain(written) == b"error\none line\nhalf\n"
    streams = [stream for _, stream in MARK.findall(written)]
    assert streams == [b"stderr", b"stdout", b"stderr"]


def test_lines_have_timestamps(tmp_path: Path) -> None:
    copy = Copy(str(tmp_path), "0", "0")
    before = time.time()
    copy.add(1, b"first\nsecond\n")
    between = time.time()
    copy.add(1, b"third\n")
    copy.close(120)
    written = (tmp_path / "logs/0/node-0.log").read_bytes()
    times = [datetime.fromisoformat(word.decode()) for word, _ in MARK.findall(written)]
    first, second, third = (time.astimezone(UTC).timestamp() for time in times)
    assert before - 1e-5 <= first == second <= between <= third + 1e-5


def test_dropped_output_is_marked_in_place(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """The storage hangs for a time, and the output is larger than the buffer."""
    copy, file = hanging_copy(tmp_path)
    copy.add(1, b"first\n")
    for _ in range(20):
        copy.add(1, b"x" * 999_999 + b"\n")
    written = read_to_end(copy, file)
    assert written.startswith(b"first\n")
    last = written.splitlines()[-1]
    assert last.startswith(b"torchrun-launch: 1")
    assert last.endswith(b"bytes are missing here")
    assert capfd.readouterr().err.count("is too slow") == 1
