"""Edits reach a running launcher: it runs valid and broken code in the same pod."""

import os
import signal
import socket
import textwrap
from collections.abc import Iterator
from pathlib import Path

import pytest

from ports import free_port
from torchrun_runtime.launch.rendezvous import of_round
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.settings import ArchiveLimits
from unit.runtime.launching import PYTHONS, Launched, Launcher, changed
from unit.runtime.syncing import archive

pytestmark = pytest.mark.long  # processes

WAITS = """
    import os, signal, time
    from helper import NAME
    print(NAME, os.environ.get("PET_RDZV_ID"), os.environ.get("MASTER_PORT"), flush=True)
    {end}
    while True: time.sleep(60)
"""


def program(name: str, end: str = "") -> "dict[str, bytes]":
    text = textwrap.dedent(WAITS).format(end=end)
    return {"train.py": text.encode(), "helper.py": f"NAME = {name!r}".encode()}


class Pod:
    """The claim and the annotations of a launcher's pod, which tests change."""

    def __init__(self, launcher: Launcher) -> None:
        self.launcher = launcher
        self._directory = launcher.directory
        self._podinfo = launcher.directory / "annotations"
        self.claim = Claim(launcher.directory / "claim")
        self.claim.directory.mkdir(parents=True, exist_ok=True)
        self.claim.prepare()
        self.annotate(0)

    def publish(self, files: "dict[str, bytes]") -> int:
        zipped = self.claim.incoming / "archive.zip"
        zipped.write_bytes(archive(files))
        revision = self.claim.publish(extract(zipped, self.claim.new, ArchiveLimits())).revision
        for program in self.claim.tree(revision).rglob("*.sh"):
            program.chmod(0o755)
        return revision

    def annotate(self, revision: int, **more: str) -> None:
        """Change the annotations of the pod as the kubelet would."""
        annotations = {"start": "0", "revision": str(revision), **more}
        temporary = self._podinfo.with_suffix(".new")
        temporary.write_text("".join(f'torchrun.ai/{k}="{v}"\n' for k, v in annotations.items()))
        temporary.rename(self._podinfo)

    @property
    def app(self) -> Path:
        return self._directory / "app"

    def start(self, command: "list[str] | None" = None, **environment: str) -> Launched:
        return self.launcher.start(
            command or [self.launcher.python, "train.py"],
            TORCHRUN_LAUNCHER="none",
            TORCHRUN_ATTEMPT="0",
            TORCHRUN_WORKSPACE_SOURCE=str(self.claim.directory),
            TORCHRUN_WORKSPACE_TARGET=str(self.app),
            TORCHRUN_START_FILE=str(self._podinfo),
            PET_RDZV_ID="job-0",
            PET_MASTER_PORT="29500",
            MASTER_PORT="29500",
            **environment,
        )


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def pod(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Pod]:
    launcher = Launcher(request.param, tmp_path)
    yield Pod(launcher)
    launcher.clear()


def test_newer_code_runs_in_the_same_pod(pod: Pod) -> None:
    pod.publish(program("one"))
    launched = pod.start()
    assert launched.line() == "one job-0 29500"
    for name, output in (("two", "two job-0-r1 29501"), ("six", "six job-0-r2 29502")):
        pod.annotate(pod.publish(program(name)))
        assert launched.line() == output
    launched.stop()
    result = launched.end()
    assert result.exit_code == 143
    assert "revision 3, 1 file, " in result.err


def test_a_revision_is_not_loaded_before_its_request(pod: Pod) -> None:
    pod.publish(program("one"))
    pod.annotate(1)
    pod.publish(program("two"))
    launched = pod.start()
    assert launched.line() == "one job-0 29500"
    pod.annotate(2)
    assert launched.line().startswith("two")


def test_a_failure_during_a_reload_does_not_end_the_pod(pod: Pod) -> None:
    pod.publish(program("one"))
    launched = pod.start()
    assert launched.line().startswith("one")
    pod.publish(program("two", "raise SystemExit(0)"))
    task = Path(f"/proc/{launched.process.pid}/task/{launched.process.pid}")
    rank = int((task / "children").read_text().split()[0])
    os.kill(rank, signal.SIGKILL)  # a peer that restarted first has left
    assert launched.process.stderr
    for line in launched.process.stderr:
        if "failed with" in line:
            break
    pod.annotate(2)
    assert launched.line().startswith("two")
    assert launched.end().exit_code == 0


def test_a_command_that_cannot_start_does_not_end_the_pod_either(pod: Pod) -> None:
    pod.publish({"other": b""})
    pod.annotate(1)
    pod.publish({"run.sh": b"#!/bin/sh\necho two; exec sleep 1000"})
    launched = pod.start(["./run.sh"])
    assert launched.process.stderr
    for line in launched.process.stderr:
        if "The image has no program" in line:
            break
    pod.annotate(2)
    assert launched.line() == "two"


def test_in_development_a_broken_edit_keeps_the_pod(pod: Pod) -> None:
    pod.publish(program("one"))
    pod.annotate(1, development="true")
    launched = pod.start()
    assert launched.line().startswith("one")
    broken = {**program("two"), "helper.py": b"NAME = ("}
    pod.annotate(pod.publish(broken), development="true")
    assert launched.process.stderr
    for line in launched.process.stderr:
        if "waits for the next edit" in line:
            break
    pod.annotate(pod.publish(program("three")), development="true")
    assert launched.line().startswith("three")
    launched.stop()
    assert launched.end().exit_code == 143


def await_edit(launched: Launched, error: str) -> None:
    """Read the log up to the wait for the next edit; it must have the error."""
    assert launched.process.stderr
    lines = []
    for line in launched.process.stderr:
        lines.append(line)
        if "waits for the next edit" in line:
            break
    assert error in "".join(lines)


def test_in_development_a_command_that_cannot_start_keeps_the_pod(pod: Pod) -> None:
    running = {"pkg/run.sh": b"#!/bin/sh\necho $TORCHRUN_ROUND; exec sleep 1000"}
    pod.annotate(pod.publish({"pkg/other": b""}), development="true")
    launched = pod.start(["./run.sh"], TORCHRUN_WORKING_DIR=str(pod.app / "pkg"))
    await_edit(launched, "The image has no program ./run.sh")
    pod.annotate(pod.publish({"pkg/run.sh": b"#!/no/such/shell"}), development="true")
    await_edit(launched, "./run.sh needs the interpreter /no/such/shell")
    pod.annotate(pod.publish({"pkg/run.sh/file": b""}), development="true")
    await_edit(launched, "Cannot start ./run.sh: Permission denied")
    pod.annotate(pod.publish({"other": b""}), development="true")
    await_edit(launched, "Cannot enter the working directory")
    pod.annotate(pod.publish(running), development="true")
    assert launched.line() == "4"
    launched.stop()
    assert launched.end().exit_code == 143


@pytest.mark.parametrize(
    ("left", "reason", "exit_code"),
    [("pkg/other", "CommandNotFound", 127), ("other", "WorkingDirMissing", 125)],
)
def test_without_development_an_edit_without_the_command_is_a_failure(
    pod: Pod, left: str, reason: str, exit_code: int
) -> None:
    pod.publish({"pkg/run.sh": b"#!/bin/sh\necho up; exec sleep 1000"})
    launched = pod.start(
        ["./run.sh"],
        TORCHRUN_WORKING_DIR=str(pod.app / "pkg"),
        TORCHRUN_IN_PLACE_RESTARTS='{"restarts": 3, "exitCodes": [], "signals": []}',
    )
    assert launched.line() == "up"
    pod.annotate(pod.publish({left: b""}))
    result = launched.end()
    assert (result.exit_code, result.message["reason"]) == (exit_code, reason)
    assert "starting round 2" not in result.err


def test_a_pod_that_waits_for_an_edit_ends_on_sigterm(pod: Pod) -> None:
    pod.publish({"train.py": b"raise SystemExit(3)"})
    pod.annotate(1, development="true")
    launched = pod.start()
    assert launched.process.stderr
    for line in launched.process.stderr:
        if "waits for the next edit" in line:
            break
    launched.stop()
    assert launched.end().exit_code == 3


def test_the_wait_for_an_edit_is_bounded(pod: Pod) -> None:
    pod.publish({"train.py": b"raise SystemExit(3)"})
    pod.annotate(1, development="true")
    result = pod.start(TORCHRUN_EDIT_WAIT_SECONDS="0.2").end()
    assert (result.exit_code, result.message["exitCode"]) == (3, 3)


def test_without_development_a_broken_edit_is_a_failure(pod: Pod) -> None:
    pod.publish(program("one"))
    launched = pod.start()
    assert launched.line().startswith("one")
    pod.annotate(pod.publish({"train.py": b"syntax error"}))
    result = launched.end()
    assert result.exit_code == 1
    assert result.message["reason"] == "Exception"
    assert str(result.message["message"]).startswith("SyntaxError")


def test_ranks_may_take_a_moment_to_end(pod: Pod) -> None:
    patient = {"round.py": {"_ROUND_GRACE = 5.0": "_ROUND_GRACE = 300.0"}}
    pod.launcher = changed(pod.launcher, patient)
    save = "signal.signal(signal.SIGTERM, lambda *_: (os.write(1, b'saved\\n'), os._exit(0)))"
    pod.publish(program("one", save + "; os.write(1, b'ready\\n')"))
    launched = pod.start()
    assert launched.line().startswith("one")
    assert launched.line() == "ready"
    pod.annotate(pod.publish(program("two")))
    assert launched.line() == "saved"
    assert launched.line().startswith("two")


def test_each_round_has_a_rendezvous_of_its_own() -> None:
    pod = {
        "PET_RDZV_ID": "id", "PET_RDZV_ENDPOINT": "host:29500", "PET_MASTER_ADDR": "host",
        "PET_MASTER_PORT": "29500", "MASTER_PORT": "29500",
    }  # fmt: skip
    assert of_round(pod, 0) == {**pod, "TORCHRUN_ROUND": "0"}
    own = of_round(pod, 2)
    assert (own["PET_RDZV_ID"], own["TORCHRUN_ROUND"]) == ("id-r2", "2")
    assert own["PET_RDZV_ENDPOINT"] == "host:29502"
    assert (own["PET_MASTER_PORT"], own["MASTER_PORT"]) == ("29502", "29502")
    other = of_round({**pod, "PET_RDZV_ENDPOINT": "etcd:2379"}, 1)
    assert other["PET_RDZV_ENDPOINT"] == "etcd:2379"


PYTHON = os.environ.get("TORCHRUN_TEST_TORCH_PYTHON", "")
RANKS = """
    import time
    import torch, torch.distributed as dist
    dist.init_process_group("gloo")
    seen = torch.tensor([{number}])
    while True:
        dist.all_reduce(seen, op=dist.ReduceOp.MIN)
        assert seen.item() == {number}
        print("all run {number}", flush=True)
        time.sleep(0.05)
"""


@pytest.mark.skipif(not PYTHON, reason="TORCHRUN_TEST_TORCH_PYTHON does not name one with torch")
@pytest.mark.parametrize("backend", ["static", "c10d"])
def test_two_nodes_of_torchrun_change_together(tmp_path: Path, backend: str) -> None:
    port = free_port()
    with socket.create_server(("127.0.0.1", port)):  # so that the next one is another
        gang_port = free_port()
    pods = []
    claim = tmp_path / "shared"
    claim_of_both = Claim(claim)
    launchers = []
    for node in range(2):
        directory = tmp_path / str(node)
        directory.mkdir()
        launchers.append(Launcher(PYTHON, directory))
        pods.append(Pod(launchers[node]))
        pods[node].claim = claim_of_both
    claim_of_both.directory.mkdir(parents=True, exist_ok=True)
    claim_of_both.prepare()

    def code(number: int) -> "dict[str, bytes]":
        return {"train.py": textwrap.dedent(RANKS).format(number=number).encode()}

    def all_run(number: int) -> None:
        for launched in running:  # with c10d, either node can be rank 0
            while launched.line() != f"all run {number}":
                assert launched.process.poll() is None, launched.end()

    pods[0].publish(code(1))
    try:
        running = [
            launchers[node].start(
                ["python", "train.py"],
                PATH=f"{Path(PYTHON).parent}:{os.environ['PATH']}",
                TORCHRUN_WORKSPACE_SOURCE=str(claim),
                TORCHRUN_WORKSPACE_TARGET=str(tmp_path / str(node) / "app"),
                TORCHRUN_START_FILE=str(tmp_path / str(node) / "annotations"),
                TORCHRUN_ATTEMPT="0",
                PET_NNODES="2", PET_NPROC_PER_NODE="1", PET_NODE_RANK=str(node),
                PET_RDZV_BACKEND=backend, PET_RDZV_ENDPOINT=f"127.0.0.1:{port}",
                PET_RDZV_ID="job-0", PET_MASTER_ADDR="127.0.0.1", PET_MASTER_PORT=str(port),
                PET_MAX_RESTARTS="0", NODE_RANK=str(node), TORCHRUN_GANG_PORT=str(gang_port),
            )
            for node in range(2)
        ]  # fmt: skip
        all_run(1)
        for number in (2, 3, 4):
            revision = pods[0].publish(code(number))
            assert revision == number
            pods[0].annotate(revision)
            all_run(number)
    finally:
        for launcher in launchers:
            launcher.clear()
