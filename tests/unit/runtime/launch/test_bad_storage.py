"""The fence of a real launcher on storage that is stale, missing or full.

A layer between the launcher and its files injects the fault that a file names. The clock of the
launcher may run faster than the clock of the test.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch import fencing
from torchrun_runtime.launch.fencing import GangId
from unit.runtime.launching import PYTHONS, Launched, Launcher

pytestmark = pytest.mark.long  # processes

SPEED = 5  # the fence of 30 s takes 6
LAYER = """
import errno, os, time

harm_file, state = os.environ["TEST_HARM"], os.environ["TORCHRUN_STATE_DIR"]
speed = int(os.environ.get("TEST_SPEED", "1"))
real_open, real_write, real_clock = os.open, os.write, time.clock_gettime
begin = real_clock(time.CLOCK_MONOTONIC)

def harm():
    with open(harm_file) as file:
        return file.read()

def opened(path, flags, *rest, **more):
    if str(path) == os.path.join(state, "epoch") and not flags & os.O_WRONLY:
        if harm() == "ESTALE":
            raise OSError(errno.ESTALE, "Stale file handle", path)
        if harm() == "cache":
            path = os.path.join(state, "cached")
    if harm() == "EROFS" and flags & os.O_CREAT and str(path).startswith(state):
        raise OSError(errno.EROFS, "Read-only file system", path)
    return real_open(path, flags, *rest, **more)

def write(descriptor, data):
    name = os.readlink(f"/proc/self/fd/{descriptor}")
    if harm() == "ENOSPC" and name.startswith(state):
        raise OSError(errno.ENOSPC, "No space left on device")
    return real_write(descriptor, data)

def clock(which):
    return begin + (real_clock(which) - begin) * speed

os.open, os.write, time.clock_gettime = opened, write, clock
"""
OLD, NEW = GangId("uid", 1), GangId("uid", 2)


class Storage:
    """A state directory with a fault."""

    def __init__(self, launcher: Launcher) -> None:
        self.state = launcher.directory / "state"
        self.state.mkdir()
        self._launcher = launcher
        self._harm = launcher.directory / "harm"
        self._layer = launcher.directory / "layer"
        self._layer.mkdir()
        (self._layer / "sitecustomize.py").write_text(LAYER)
        self.harm("")

    def harm(self, name: str) -> None:
        """From now on every read or write fails in this way."""
        if name == "cache":
            (self.state / "cached").write_bytes((self.state / "epoch").read_bytes())
        following = self._harm.with_suffix(".new")
        following.write_text(name)
        os.replace(following, self._harm)

    def start(self, **environment: str) -> Launched:
        return self._launcher.start(
            "echo runs; trap '' TERM; sleep 100",
            PYTHONPATH=str(self._layer),
            TEST_HARM=str(self._harm),
            TORCHRUN_STATE_DIR=str(self.state),
            TORCHRUN_JOB_UID="uid",
            TORCHRUN_ATTEMPT="1",
            NODE_RANK="0",
            **environment,
        )

    def reads(self) -> None:
        """Wait for the next read of the epoch: the launcher repairs a value of another writer."""
        fencing._write(str(self.state), "epoch", GangId("uid", 0))
        deadline = time.monotonic() + 120
        while fencing.read(str(self.state), "epoch") != OLD:
            assert time.monotonic() < deadline
            time.sleep(0.02)


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Storage]:
    launcher = Launcher(request.param, tmp_path)
    yield Storage(launcher)
    launcher.clear()


def test_a_stale_handle_kills_the_ranks(storage: Storage) -> None:
    launched = storage.start(TEST_SPEED=str(SPEED))
    assert launched.line() == "runs"
    storage.harm("ESTALE")
    result = launched.end()
    assert (result.exit_code, result.message["reason"]) == (125, "Fenced")
    assert "The state directory" in str(result.message["message"])


def test_a_stale_handle_that_recovers_changes_nothing(storage: Storage) -> None:
    launched = storage.start()
    assert launched.line() == "runs"
    storage.harm("ESTALE")
    time.sleep(2 * fencing.POLL_SECONDS)
    storage.harm("")
    storage.reads()
    assert launched.process.poll() is None


def test_a_cache_delays_the_fence_for_as_long_as_it_is_stale(storage: Storage) -> None:
    launched = storage.start()
    assert launched.line() == "runs"
    storage.harm("cache")
    fencing._write(str(storage.state), "epoch", NEW)
    time.sleep(2 * fencing.POLL_SECONDS)
    assert launched.process.poll() is None, "it cannot see the newer gang"
    storage.harm("")
    result = launched.end()
    assert (result.exit_code, result.message["reason"]) == (125, "Fenced")
    assert "Attempt 2 of this job has taken over" in str(result.message["message"])
    assert fencing.read(str(storage.state), "epoch") == NEW, "it did not overwrite the epoch"


def test_a_full_disk_does_not_stop_a_gang_without_a_fence(storage: Storage) -> None:
    storage.harm("ENOSPC")
    launched = storage.start()
    assert launched.line() == "runs"
    launched.stop()
    launched.process.kill()
    _, err = launched.process.communicate(timeout=300)
    assert "running without the fence" in err
    left = [name for name in os.listdir(storage.state) if "epoch" in name]
    assert left == [], "partial files are removed"


def test_a_full_disk_proves_no_fence(storage: Storage) -> None:
    fencing._write(str(storage.state), "epoch", GangId("uid", 0))
    (storage.state / "watchers").mkdir()
    (storage.state / "watchers" / "uid.0.1").touch()
    annotations = storage.state.parent / "annotations"
    annotations.write_text('torchrun.ai/start="1"\ntorchrun.ai/fence="2026-01-02T03:04:05Z 0:1"\n')
    storage.harm("ENOSPC")
    result = storage.start(TORCHRUN_START_FILE=str(annotations)).end()
    assert (result.exit_code, result.out) == (125, "")
    assert result.message["reason"] == "Fenced"
    assert "Cannot fence older workers" in str(result.message["message"])


@pytest.mark.parametrize("harm", ["ENOSPC", "EROFS"])
def test_storage_that_fails_the_second_pod_of_a_worker_proves_no_fence(
    storage: Storage, harm: str
) -> None:
    """The Job was suspended and resumes. The first pod has registered."""
    (storage.state / "watchers").mkdir()
    (storage.state / "watchers" / "uid.1.0").touch()
    storage.harm(harm)
    result = storage.start().end()
    assert (result.exit_code, result.out) == (125, "")
    assert result.message["reason"] == "Fenced"
    assert "Cannot watch for newer attempts" in str(result.message["message"])


def test_read_only_storage_does_not_stop_the_first_pod_of_a_worker(storage: Storage) -> None:
    storage.harm("EROFS")
    launched = storage.start()
    assert launched.line() == "runs"
    assert launched.process.stderr
    assert "running without the state directory" in launched.process.stderr.readline()
