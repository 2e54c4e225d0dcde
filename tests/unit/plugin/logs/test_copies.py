"""Logs of earlier attempts."""

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from kubectl_torchrun.logs import copies
from kubectl_torchrun.logs import rotated as rotated_logs

from ..claim import ENDED, play_kubelet, remaining_readers, write
from ..laptop import Laptop

pytestmark = pytest.mark.long  # processes


def test_logs_of_the_previous_attempt_come_from_a_running_worker(
    laptop: Laptop, claim: Path
) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running"})
    pod = laptop.worker("run", 0, 1, "2026-01-01T00:00:00.000000000Z now\n")
    write(claim, 0, "second", "third", older="first\n")
    write(claim, 1, "other")
    result = laptop.run("logs", "run", "--previous")
    assert result.exit_code == 0, result.output
    assert result.stdout == "[0] first\n[0] second\n[0] third\n[1] other\n"
    assert "node by node" in result.stderr
    assert f"--namespace=ns {pod} -c trainer --" in (claim.parents[1] / "execs").read_text()
    assert laptop.run("logs", "run").stdout == "[0] now\n"
    tail = laptop.run("logs", "run", "--attempt", "0", "--tail", "2", "--node", "0")
    assert tail.stdout == "[0] second\n[0] third\n"
    since = laptop.run("logs", "run", "-p", "--since", "1m", "--node", "1")
    assert since.stdout == "[1] other\n"
    assert "--since does not apply to them" in since.stderr


def test_existing_pods_are_read_directly(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running"})
    died = {"terminated": {"exitCode": 1}}
    laptop.worker("run", 0, 0, "2026-01-01T00:00:00.000000000Z mine\n", **died)
    laptop.worker("run", 0, 1)
    write(claim, 0, "copy of mine")
    mark = "2026-01-01T00:00:00.{}00000000Z stdout F "
    write(claim, 1, mark.format(0) + "copy of the other's", mark.format(9) + "the end")
    result = laptop.run("logs", "run", "-p")
    assert result.stdout == "[0] mine\n[1] copy of the other's\n[1] the end\n"
    assert "times" not in result.stderr


def test_copies_replace_deleted_pods_of_the_last_attempt(laptop: Laptop, claim: Path) -> None:
    """The garbage collection of pods, or a drained node, has removed one of them."""
    laptop.job("run", status={**ENDED, "numNodes": 2})
    laptop.worker("run", 0, 1, "2026-01-01T00:00:02.000000000Z mine\n")
    (claim / "logs/1").mkdir()
    write(claim, 1, stamped(1, "the other's"), attempt=1)
    result = laptop.run("logs", "run")
    assert result.exit_code == 0, result.output
    assert result.stdout == "[1] the other's\n[0] mine\n"
    assert laptop.run("logs", "run", "--node", "1").stdout == "[1] the other's\n"
    both = laptop.run("logs", "run", "--node", "0", "--rank", "1")
    assert both.stdout == result.stdout
    no_claim(laptop)
    assert laptop.run("logs", "run", "--node", "0").stderr == ""
    incomplete = laptop.run("logs", "run")
    assert (incomplete.exit_code, incomplete.stdout) == (0, "[0] mine\n")
    assert "Cannot read the copies of the logs. Job run has no state directory" in (
        incomplete.stderr
    )


def test_no_copies_are_read_while_the_job_runs(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running", "numNodes": 2})
    laptop.worker("run", 0, 1, "2026-01-01T00:00:02.000000000Z mine\n")
    assert laptop.run("logs", "run").stdout == "[0] mine\n"
    assert not (claim.parents[1] / "execs").exists()


def stamped(second: int, text: str, stream: str = "stdout") -> str:
    return f"2026-01-01T00:00:{second:02}.123456789Z {stream} F {text}"


def test_copies_of_several_nodes_are_merged_by_time(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running"})
    laptop.worker("run", 0, 1)
    write(claim, 0, stamped(2, "second"), stamped(4, ""), stamped(6, "sixth"),
          older="0:00.1Z stdout F cut\n" + stamped(1, "first") + "\n")  # fmt: skip
    write(claim, 1, stamped(3, "third", "stderr"), stamped(5, "a b F c"))
    result = laptop.run("logs", "run", "-p")
    shown = ["[0] first", "[0] second", "[1] third", "[0] ", "[1] a b F c", "[0] sixth"]
    assert result.stdout.splitlines() == shown
    assert result.stderr == ""
    tail = laptop.run("logs", "run", "-p", "--tail", "1").stdout
    assert tail == "[1] a b F c\n[0] sixth\n"
    now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%f000Z stdout F new")
    write(claim, 1, stamped(3, "old"), now)
    assert laptop.run("logs", "run", "-p", "--since", "1h").stdout == "[1] new\n"


def test_copies_of_an_older_launcher_are_read_beside_others(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running"})
    laptop.worker("run", 0, 1)
    write(claim, 0, stamped(2, "timed"))
    write(claim, 1, "2026 stdout F", "plain")
    result = laptop.run("logs", "run", "-p")
    assert result.stdout == "[1] 2026 stdout F\n[1] plain\n[0] timed\n"
    assert "they are printed first, node by node." in result.stderr


def test_ranks_choose_nodes_and_marked_lines(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running", "gpus": 4, "numNodes": 2})
    laptop.worker("run", 0, 1)
    write(claim, 0, "[default0]:a", "[default1]:b", "plain")
    write(claim, 1, "[default0]:c", "[default1]:d")
    shown = laptop.run("logs", "run", "-p", "--rank", "1", "--rank", "2").stdout
    assert shown == "[0] [default1]:b\n[0] plain\n[1] [default0]:c\n"


@pytest.mark.parametrize(
    ("job", "kubelet", "message"),
    [
        ({"spec": {"jobQueue": "q"}}, {}, "it has no workspace PVC of its own"),
        (
            {},
            {"phase": "Failed", "message": "Evicted"},
            " cannot read PVC run-workspace: Evicted",
        ),
        ({"spec": {"jobQueue": "none"}, "x": 1}, {}, "it has no workspace PVC of its own"),
    ],
)
def test_missing_logs_are_reported_with_the_reason(
    laptop: Laptop, claim: Path, job: dict[str, object], kubelet: dict[str, object], message: str
) -> None:
    laptop.server.put("torchrunqueues", "q", spec={"image": "image"})
    laptop.job("run", status=ENDED, **job)
    play_kubelet(laptop, **kubelet)
    result = laptop.run("logs", "run", "--previous")
    assert result.exit_code == 4
    assert message in result.stderr
    assert not remaining_readers(laptop)


DIRECT = [{"type": "WorkspaceReady", "status": "True", "reason": "DirectDelivery"}]


def direct_delivery(laptop: Laptop) -> None:
    laptop.job("run", status={**ENDED, "conditions": DIRECT})


def direct_delivery_before_it_is_recorded(laptop: Laptop) -> None:
    workspace = {"source": "zip", "delivery": "direct"}
    laptop.job("run", status=ENDED, spec={"jobQueue": "q", "volumes": {"workspace": workspace}})


def no_claim(laptop: Laptop) -> None:
    laptop.server.delete("persistentvolumeclaims", "run-workspace")


def unbound_claim(laptop: Laptop) -> None:
    laptop.server.put("persistentvolumeclaims", "run-workspace", status={"phase": "Pending"})


def read_only_claim(laptop: Laptop) -> None:
    modes = {"accessModes": ["ReadOnlyMany"]}
    laptop.server.put("persistentvolumeclaims", "run-workspace", spec=modes)


@pytest.mark.parametrize("running", [False, True])
@pytest.mark.parametrize(
    ("change", "message"),
    [
        (direct_delivery, "its workspace is delivered directly. To keep copies in a new job, set"),
        (direct_delivery_before_it_is_recorded, "its workspace is delivered directly."),
        (no_claim, "PVC run-workspace does not exist. Only the logs of"),
        (unbound_claim, "PVC run-workspace is not bound. See: kubectl"),
        (read_only_claim, "PVC run-workspace is ReadOnlyMany. To keep copies in a new job, set"),
    ],
)
def test_a_job_that_keeps_no_copies_is_reported_without_a_pod(
    laptop: Laptop,
    claim: Path,
    change: Callable[[Laptop], None],
    message: str,
    running: bool,
) -> None:
    laptop.job("run", status=ENDED)
    change(laptop)
    if running:
        laptop.worker("run", 0, 1)
    reader_pods = play_kubelet(laptop, phase="Running")
    result = laptop.run("logs", "run", "--previous")
    assert result.exit_code == 4
    assert f"Job run has no state directory with copies of logs: {message}" in " ".join(
        result.stderr.split()
    )
    assert not reader_pods


def test_a_copy_that_is_too_long_ends_with_a_note(
    laptop: Laptop, claim: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(copies, "_COPY_BYTES", 2048)
    laptop.job("run", status={**ENDED, "phase": "Running"})
    laptop.worker("run", 0, 1)
    write(claim, 0, *["x" * 1000] * 1000)
    result = laptop.run("logs", "run", "-p")
    assert result.exit_code == 0, result.output
    end = "[0] (the copy is longer than 2.0 KiB; it ends here)"
    assert result.stdout.splitlines() == [f"[0] {'x' * 1000}", f"[0] {'x' * 1000}", end]


def test_names_of_copies_may_be_any_bytes(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running"})
    laptop.worker("run", 0, 1)
    write(claim, 0, "words")
    for name in (b"\xff", b"node-" + b"9" * 200 + b".log"):
        (claim / "logs/0" / os.fsdecode(name)).touch()
    assert laptop.run("logs", "run", "-p").stdout == "[0] words\n"


def test_a_command_in_a_pod_may_print_many_errors(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running"})
    laptop.worker("run", 0, 1)
    write(claim, 0, "words")
    program = claim.parents[1] / "bin" / "tail"
    program.write_text("#!/bin/sh\nyes error | head -n 100000 >&2\necho text\n")
    program.chmod(0o755)
    assert laptop.run("logs", "run", "-p", "--tail", "5").stdout == "[0] text\n"


def test_missing_attempts(laptop: Laptop, claim: Path) -> None:
    laptop.job("run", status={**ENDED, "phase": "Running", "attempt": 7})
    laptop.worker("run", 0, 7)
    result = laptop.run("logs", "run", "--attempt", "3")
    assert result.exit_code == 2
    assert "has no matching log of attempt 3. It has logs of attempts 0" in result.stderr
    result = laptop.run("logs", "run", "--attempt", "9")
    assert result.exit_code == 2
    assert "The latest is 7." in result.stderr
    laptop.job("first", status={"phase": "Running"})
    assert "is on its first attempt" in laptop.run("logs", "first", "-p").stderr
    assert laptop.run("logs", "run", "-p", "--attempt", "1").exit_code == 2
    assert laptop.run("logs", "run", "-p", "-f").exit_code == 2


def rotated(
    laptop: Laptop, claim: Path, lines: int = 300, kept: int = 25, state: str = "running"
) -> None:
    """The pod's log has only the last lines; the copy has all, with slightly earlier times."""
    start = {"startedAt": "2026-01-01T00:00:00Z"}
    texts = [f"step {number}" for number in range(lines)]
    copy = [f"{clock(number)}.100000000Z stdout F {text}" for number, text in enumerate(texts)]
    log = [f"{clock(number)}.100000999Z {text}\n" for number, text in enumerate(texts)]
    laptop.job("run", status={**ENDED, "numNodes": 1, "phase": "Running", "attempt": 0})
    laptop.worker("run", 0, 0, *log[lines - kept :], **{state: start})
    write(claim, 0, *copy)


@pytest.fixture(autouse=True)
def _small_logs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rotated_logs, "_LARGE_BYTES", 200)


def clock(seconds: int) -> str:
    return f"{datetime(2026, 1, 1, tzinfo=UTC) + timedelta(seconds=seconds):%Y-%m-%dT%H:%M:%S}"


@pytest.mark.parametrize(
    ("flags", "first", "count"),
    [((), 0, 300), (("--tail", "100"), 200, 100), (("--tail", "9"), 291, 9), (("--raw",), 0, 300)],
)
def test_lines_that_the_kubelet_has_removed_come_from_the_copy(
    laptop: Laptop, claim: Path, flags: tuple[str, ...], first: int, count: int
) -> None:
    rotated(laptop, claim)
    result = laptop.run("logs", "run", *flags)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == [
        f"[0] step {number}" for number in range(first, first + count)
    ]
    assert result.stderr == ""


def test_a_followed_log_begins_with_the_copy(laptop: Laptop, claim: Path) -> None:
    rotated(laptop, claim, state="terminated")
    laptop.server.put("torchrunqueues", "q", spec={"image": "x"})
    play_kubelet(laptop, phase="Running")
    laptop.once_watched(lambda: laptop.job("run", status={"phase": "Succeeded", "attempt": 0}))
    result = laptop.run("logs", "run", "--follow")
    assert result.stdout.splitlines() == [f"[0] step {number}" for number in range(300)]


def test_a_log_that_is_cut_says_so_without_a_copy(laptop: Laptop, claim: Path) -> None:
    rotated(laptop, claim)
    (claim / "logs" / "0" / "node-0.log").unlink()
    result = laptop.run("logs", "run")
    assert len(result.stdout.splitlines()) == 25
    assert "The log of node 0 begins 4m35s after its start." in result.stderr
