"""scale, suspend, resume, cancel and --wait."""

import json
import signal
import threading
from collections.abc import Callable
from types import SimpleNamespace

import pytest
from aiohttp import web

from kubectl_torchrun.cluster import lifecycle, wait
from kubectl_torchrun.cluster.job_watch import JobWatch
from kubectl_torchrun.cluster.slices import JobSlice, JobStatusSlice
from kubectl_torchrun.cluster.wait import check, met
from kubectl_torchrun.errors import UsageProblem
from kubectl_torchrun.upload import submission

from ..laptop import Laptop, play_controller

ELASTIC = {"jobQueue": "q", "numNodes": 2, "elastic": {"minNodes": 1, "maxNodes": 4}}


def spec(laptop: Laptop, name: str = "run") -> dict[str, object]:
    found: dict[str, object] = laptop.server.objects["torchrunjobs", name]["spec"]  # type: ignore[assignment]
    return found


@pytest.mark.long
def test_suspend_and_resume_set_one_field(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    result = laptop.run("suspend", "run")
    assert result.exit_code == 0
    assert spec(laptop) == {"suspend": True}
    assert "kubectl torchrun resume run -n ns" in result.stderr
    assert laptop.run("resume", "run", "-o", "json").exit_code == 0
    assert spec(laptop) == {"suspend": False}


@pytest.mark.long
def test_a_finished_job_cannot_be_suspended(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Failed"})
    result = laptop.run("suspend", "run")
    assert result.exit_code == 2
    assert "it" not in spec(laptop)
    assert "Cannot suspend job run: it is already Failed." in result.stderr


@pytest.mark.long
def test_an_elastic_job_can_be_scaled(laptop: Laptop) -> None:
    laptop.job("run", spec=ELASTIC, status={"phase": "Running"})
    result = laptop.run("scale", "run", "--nodes", "4")
    assert result.exit_code == 0
    assert spec(laptop) == {"numNodes": 4}
    assert "Scaling job run from 2 to 4 nodes." in result.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"spec": ELASTIC}, "cannot have 9 nodes. spec.elastic allows 1 to 4."),
        ({"spec": {"numGPUs": 8}}, "requests 8 GPUs (spec.numGPUs) and has a fixed size"),
        ({"spec": {"numNodes": 2}}, "so its size is fixed"),
    ],
)
def test_invalid_sizes(laptop: Laptop, job: dict[str, object], message: str) -> None:
    laptop.job("run", status={"phase": "Running", "workers": {"running": 2}}, **job)
    result = laptop.run("scale", "run", "--nodes", "9")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("phase", ["Pending", "Syncing", "Queued"])
def test_a_job_that_has_not_started_can_be_scaled(laptop: Laptop, phase: str) -> None:
    nominated = {"nominated": True}
    laptop.job("run", spec={"numNodes": 2}, status={"phase": phase, "admission": nominated})
    assert laptop.run("scale", "run", "--nodes", "4").exit_code == 0
    assert spec(laptop) == {"numNodes": 4}


@pytest.mark.long
@pytest.mark.parametrize("started", [{"workers": {"running": 0}}, {"admission": {"nodes": 2}}])
@pytest.mark.parametrize("phase", ["Pending", "Syncing", "Queued", "Suspended"])
def test_a_job_that_has_started_keeps_its_size_in_every_phase(
    laptop: Laptop, phase: str, started: dict[str, object]
) -> None:
    laptop.job("run", spec={"numNodes": 2}, status={"phase": phase, **started})
    result = laptop.run("scale", "run", "--nodes", "4")
    assert result.exit_code == 2
    assert f"Job run ({phase}) has started and is not elastic" in result.stderr
    assert "so its size is fixed" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("dry_run", ["client", "server"])
def test_a_dry_run_changes_nothing(laptop: Laptop, dry_run: str) -> None:
    laptop.job("run", spec=ELASTIC, status={"phase": "Running"})
    before = json.dumps(laptop.server.objects["torchrunjobs", "run"])
    assert laptop.run("scale", "run", "--nodes", "3", f"--dry-run={dry_run}").exit_code == 0
    assert laptop.run("cancel", "run", f"--dry-run={dry_run}").exit_code == 0
    assert json.dumps(laptop.server.objects["torchrunjobs", "run"]) == before
    patched = any(request.startswith("PATCH") for request in laptop.server.requests)
    assert patched == (dry_run == "server")


@pytest.mark.long
def test_cancel_deletes_and_names_remaining_objects(laptop: Laptop) -> None:
    laptop.job("run")
    laptop.job("other")
    labels = {"torchrun.ai/retained-from": "run"}
    laptop.server.put("persistentvolumeclaims", "run-checkpoints", metadata={"labels": labels})
    result = laptop.run("cancel", "run", "other", "--wait")
    assert result.exit_code == 0
    assert not [name for plural, name in laptop.server.objects if plural == "torchrunjobs"]
    assert "Deleted torchrunjob.torchrun.ai/run\n" in result.stderr
    assert "PVCs are deleted, except run-checkpoints." in result.stderr


@pytest.mark.long
def test_a_wrong_name_does_not_affect_the_others(laptop: Laptop) -> None:
    laptop.job("run")
    result = laptop.run("cancel", "rum", "run", "run")
    assert result.exit_code == 1
    assert result.stderr.startswith("Job rum not found in namespace ns.\nDeleted torchrunjob")
    assert ("torchrunjobs", "run") not in laptop.server.objects
    result = laptop.run("cancel", "rum", "run")
    assert result.exit_code == 2
    assert "Job rum, run not found in namespace ns. Nothing was deleted." in result.stderr


@pytest.mark.long
def test_a_job_that_is_gone_after_the_question_does_not_affect_the_others(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    laptop.job("one")
    laptop.job("other")

    def confirm(jobs: list[str], exception: str) -> bool:
        laptop.server.delete("torchrunjobs", "one")
        return True

    monkeypatch.setattr(lifecycle, "_confirm", confirm)
    result = laptop.run("cancel", "one", "other", "--wait", "-o", "name")
    assert (result.exit_code, result.stdout) == (1, "torchrunjob.torchrun.ai/other\n")
    assert result.stderr.startswith("Job one not found in namespace ns.\nDeleted torchrunjob")
    assert "Its pods get a grace period." in result.stderr
    assert ("torchrunjobs", "other") not in laptop.server.objects


@pytest.mark.long
def test_one_node_is_not_many(laptop: Laptop) -> None:
    laptop.job("run", spec=ELASTIC, status={"phase": "Running"})
    assert "from 2 to 1 node." in laptop.run("scale", "run", "--nodes", "1").stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "deleted"), [("y", True), ("Yes", True), ("n", False), ("", False)]
)
def test_cancel_asks_on_a_terminal(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, answer: str, deleted: bool
) -> None:
    laptop.job("run")
    asked: list[str] = []

    class Terminal:
        @staticmethod
        def isatty() -> bool:
            return True

    class System:
        stdin = stderr = Terminal

    def ask(question: str) -> str:
        asked.append(question)
        return answer

    monkeypatch.setattr(lifecycle, "sys", System)
    monkeypatch.setattr(lifecycle, "ask", ask)
    result = laptop.run("cancel", "run")
    assert asked == ["Delete run with pods and PVCs? [y/N]:"]
    assert result.exit_code == (0 if deleted else 130)
    assert (("torchrunjobs", "run") in laptop.server.objects) != deleted


def begin_limit_at(monkeypatch: pytest.MonkeyPatch, state: Callable[[JobSlice], bool]) -> None:
    """Begin the limit of --wait when the command has read this state, which may take longer."""
    until = wait.until

    async def until_after_state(job_watch: JobWatch, *arguments: object) -> int:
        while job_watch.job is None or not state(job_watch.job):
            await job_watch.next_change(1)
        return await until(job_watch, *arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(wait, "until", until_after_state)


@pytest.mark.long
def test_wait_ends_with_the_condition_or_the_timeout(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_limit_at(monkeypatch, lambda job: True)
    laptop.job("run", status={"phase": "Running"})
    assert laptop.run("resume", "run", "--wait").exit_code == 0
    result = laptop.run("suspend", "run", "--wait", "--timeout", "0.2s")
    assert result.exit_code == 5
    assert "run is not Suspended after 0.2 s. It is Running" in result.stderr
    assert laptop.run("suspend", "run", "--wait=Sunday").exit_code == 2


@pytest.mark.long
def test_wait_ends_with_the_run(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    laptop.once_watched(lambda: laptop.job("run", status={"phase": "Failed"}))
    result = laptop.run("suspend", "run", "--wait=suspended")
    assert result.exit_code == 1
    assert "run is Failed, not Suspended" in result.stderr


def running(nodes: int, generation: int) -> dict[str, object]:
    return {"phase": "Running", "numNodes": nodes, "observedGeneration": generation}


def play_writes(laptop: Laptop, *statuses: dict[str, object]) -> list[dict[str, object]]:
    """The API server counts a write; then the controller sets each status. Returns those left."""
    left = list(statuses)
    laptop.job("run", spec=ELASTIC, metadata={"generation": 1}, status=running(2, 1))
    laptop.server.on_patch = lambda: laptop.job("run", metadata={"generation": 2})

    def advance() -> None:
        while left:
            laptop.job("run", status=left.pop(0))

    laptop.once_watched(advance)
    return left


@pytest.mark.long
def test_wait_ignores_what_was_before_the_change(laptop: Laptop) -> None:
    left = play_writes(laptop, running(2, 2), running(3, 2), running(4, 2))
    result = laptop.run("scale", "run", "--nodes", "4", "--wait")
    assert (result.exit_code, left) == (0, [])
    left = play_writes(laptop, {"phase": "Queued", "observedGeneration": 2}, running(2, 2))
    assert laptop.run("resume", "run", "--wait").exit_code == 0
    assert left == []


@pytest.mark.long
def test_wait_for_a_size_that_does_not_come(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    begin_limit_at(monkeypatch, lambda job: job.status.num_nodes == 3)
    play_writes(laptop, running(3, 2))
    result = laptop.run("scale", "run", "--nodes", "4", "--wait", "--timeout", "0.2s")
    assert result.exit_code == 5
    assert "run is not Running with 4 nodes after 0.2 s." in result.stderr
    assert "Its size is 3." in result.stderr


@pytest.mark.long
def test_wait_for_a_size_ends_with_the_run(laptop: Laptop) -> None:
    play_writes(laptop, {"phase": "Succeeded", "numNodes": 2, "observedGeneration": 1})
    assert laptop.run("scale", "run", "--nodes", "4", "--wait").exit_code == 0


@pytest.mark.long
def test_a_job_that_is_deleted_during_the_wait(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    laptop.once_watched(lambda: laptop.server.delete("torchrunjobs", "run"))
    result = laptop.run("suspend", "run", "--wait")
    assert result.exit_code == 1
    assert "was deleted before it was Suspended" in result.stderr


def test_which_values_are_conditions() -> None:
    job = JobSlice()
    assert not met(job, "Running")
    assert met(None, "Deleted")
    assert not met(None, "Running")
    assert not met(job, "Deleted")
    for phase, has_run in (("Succeeded", True), ("Failed", False), ("Suspended", False)):
        assert met(JobSlice(status=JobStatusSlice(phase=phase)), "Running") == has_run
    assert not met(JobSlice(status=JobStatusSlice(phase="Running")), "Succeeded")
    assert check("workspaceready") == "WorkspaceReady"
    with pytest.raises(UsageProblem, match="Valid values: Pending"):
        check("x")


@pytest.mark.long
@pytest.mark.parametrize(("condition", "code"), [("Succeeded", 0), ("Complete", 1)])
def test_submit_can_wait_without_following(laptop: Laptop, condition: str, code: int) -> None:
    play_controller(laptop.server)  # sets no other condition than WorkspaceReady
    result = laptop.run("submit", "--name", "run", f"--wait={condition}", "-o", "name", "x")
    assert (result.exit_code, result.stdout) == (code, "torchrunjob.torchrun.ai/run\n")
    assert ("run is Succeeded, not Complete" in result.stderr) == (code == 1)


def press(laptop: Laptop, path: str, times: list[str], most: int) -> None:
    def hook(request: web.Request) -> None:
        if path in request.path and len(times) < most:
            times.append(path)
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    laptop.server.hooks.append(hook)


@pytest.mark.long
@pytest.mark.parametrize("path", ["/proxy/", "/log"])
def test_one_ctrl_c_detaches_from_a_run(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    monkeypatch.setattr(submission, "ASK_SECONDS", 0.1)
    play_controller(laptop.server)
    press(laptop, path, [], 1)
    result = laptop.run("run", "--name", "run", "x")
    assert result.exit_code == 130
    assert "Detaching. Press Ctrl-C again within 0 s to delete job run." in result.stderr
    assert ("torchrunjobs", "run") in laptop.server.objects


@pytest.mark.long
@pytest.mark.parametrize("path", ["/proxy/", "/log"])
def test_two_ctrl_c_delete_the_job(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, path: str
) -> None:
    def again(_: float) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(submission, "time", SimpleNamespace(sleep=again))
    play_controller(laptop.server)
    press(laptop, path, [], 1)
    result = laptop.run("run", "--name", "run", "x")
    assert result.exit_code == 130
    assert "Deleted torchrunjob.torchrun.ai/run" in result.stderr
    assert ("torchrunjobs", "run") not in laptop.server.objects


@pytest.mark.long
def test_a_third_ctrl_c_warns_that_the_job_may_exist(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    def again(_: float) -> None:
        press(laptop, "torchrunjobs/run", [], 1)
        raise KeyboardInterrupt

    monkeypatch.setattr(submission, "time", SimpleNamespace(sleep=again))
    play_controller(laptop.server)
    press(laptop, "/log", [], 1)
    result = laptop.run("run", "--name", "run", "x")
    assert result.exit_code == 130
    assert "Stopped while job run was being deleted" in result.stderr


@pytest.mark.long
def test_run_returns_the_result_of_the_job(laptop: Laptop) -> None:
    play_controller(laptop.server, "Failed")
    assert laptop.run("run", "--name", "run", "x").exit_code == 1


@pytest.mark.long
def test_run_can_detach(laptop: Laptop) -> None:
    play_controller(laptop.server, "Failed")
    result = laptop.run("run", "--name", "run", "--detach", "-o", "name", "x")
    assert (result.exit_code, result.stdout) == (0, "torchrunjob.torchrun.ai/run\n")
    assert laptop.run("run", "-o", "name", "x").exit_code == 2


@pytest.mark.long
def test_ctrl_c_during_the_creation_warns_that_the_job_may_exist(laptop: Laptop) -> None:
    def hook(request: web.Request) -> None:
        if request.method == "POST":
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    laptop.server.hooks.append(hook)
    result = laptop.run("submit", "--name", "run", "x")
    assert result.exit_code == 130
    assert "so it may or may not exist" in result.stderr
