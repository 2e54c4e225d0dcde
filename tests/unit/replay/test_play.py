"""A replay computes the Plans of the controller from any recording."""

import io
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from msgspec.structs import replace

from torchrun_api.kinds import JOBS, NODES, PODS, TORCHRUN_JOBS
from torchrun_controller.reconcile import reconcile
from torchrun_controller.reconcile.schedulers.volcano import VOLCANO_POD_GROUPS
from torchrun_controller.replay import play
from torchrun_controller.replay.play import Decision, Player
from torchrun_controller.replay.show import Printer
from unit.replay.film import DISCOVERY, Film, applied, at, job, queue
from world import DEFAULTS


def last_of(decisions: list[Decision], name: str = "train") -> Decision:
    return next(d for d in reversed(decisions) if d.key == ("ml", name))


async def test_a_new_job_gets_the_plan_of_reconcile() -> None:
    film = Film().starts(job(numNodes=1), queue())
    player = Player(DEFAULTS)
    (decision,) = await film.decisions(player)
    observed = player._factory.observe("ml", "train")
    assert observed is not None
    assert decision.plan == reconcile(observed, decision.time, defaults=DEFAULTS)
    assert "jobs.batch/train" in applied(decision)
    assert decision.cause == "services"  # the last required list


async def test_a_recording_without_nodes_does_not_wait_for_them() -> None:
    """As one of a controller that may not read nodes."""
    film = Film().starts(job(numNodes=2, reliability={"podReplacement": "Pod"}), queue())
    del film.lines[-2:]  # the list of nodes is the last one
    player = Player(replace(DEFAULTS, progress_url="http://controller:8082"))
    (decision,) = await film.decisions(player)
    observed = player._factory.observe("ml", "train")
    assert observed is not None
    assert observed.cluster.nodes is None
    assert "jobs.batch/train" in applied(decision)


async def test_no_decision_before_every_cache_is_filled() -> None:
    film = Film().starts(job(numNodes=1), queue())
    del film.lines[-6:]  # events and nodes, which are optional, and services
    assert await film.decisions() == []


async def test_recorded_writes_are_not_planned_again() -> None:
    film = Film().starts(job(numNodes=1), queue())
    (first,) = await film.decisions()
    film.event(JOBS, "ADDED", applied(first)["jobs.batch/train"])
    second = last_of(await film.decisions())
    assert second.cause == "jobs.batch/train"
    assert not applied(second)


async def test_a_requeue_is_played_at_its_time() -> None:
    kept = {"reliability": {"ttlSecondsAfterFinished": 60}}
    film = Film().starts(job(numNodes=1, **kept), queue())
    done: dict[str, Any] = job(numNodes=1, **kept)
    done["status"] = {"phase": "Succeeded", "completionTime": at(30).isoformat()}
    film.event(TORCHRUN_JOBS, "MODIFIED", done)
    asked = last_of(await film.decisions())
    assert asked.plan.requeue_after is not None
    due = asked.time.timestamp() + asked.plan.requeue_after
    film.now = at(300)
    film.event(PODS, "BOOKMARK", {"metadata": {"name": ""}})
    looked = last_of(await film.decisions())
    assert (looked.cause, looked.time.timestamp()) == ("time", pytest.approx(due))
    assert [delete.kind for delete in looked.plan.deletes] == [TORCHRUN_JOBS]


async def test_pages_and_streamed_lists_have_the_same_plans() -> None:
    film = Film().starts(queue())
    film.page(TORCHRUN_JOBS, [job("one", numNodes=1)], "more", first=True)
    film.page(TORCHRUN_JOBS, [job("two", numNodes=1)], "", first=False)
    decisions = await film.decisions()
    assert [decision.key for decision in decisions] == [("ml", "one"), ("ml", "two")]


async def test_objects_missing_in_a_new_list_are_deleted() -> None:
    film = Film().starts(job("one", numNodes=1), job("two", numNodes=1), queue())
    film.lists(TORCHRUN_JOBS, [job("two", numNodes=1)])
    player = Player(DEFAULTS)
    *first, last = await film.decisions(player)
    assert [decision.key[1] for decision in first] == ["one", "two"]
    assert last.key == ("ml", "two")
    assert player._factory.observe("ml", "one") is None


async def test_an_invalid_frame_affects_nothing_else() -> None:
    film = Film().starts(job(numNodes=1), queue())
    film.text(TORCHRUN_JOBS, '{"type":"MODIFIED","object":{"metadata":{"name":"train"')
    film.event(TORCHRUN_JOBS, "MODIFIED", job(numNodes=2))
    assert last_of(await film.decisions()).cause == "torchrunjobs.torchrun.ai/train"


async def test_an_expired_watch_continues_with_the_next_list() -> None:
    film = Film().starts(job(numNodes=1), queue())
    status = {"metadata": {}, "code": 410, "reason": "Expired", "message": "too old"}
    film.event(TORCHRUN_JOBS, "ERROR", status)
    film.lists(TORCHRUN_JOBS, [job("other", numNodes=1)])
    assert (await film.decisions())[-1].key == ("ml", "other")


async def test_groups_are_read_after_their_kind_is_installed() -> None:
    film = Film().starts(job(numNodes=1), queue())
    group = {"kind": "PodGroup", "metadata": {"name": "train", "namespace": "ml"}}
    labels = {"torchrun-job-name": "train"}
    group["metadata"]["labels"] = labels  # type: ignore[index]
    serves = {
        "metadata": {"name": "scheduling.volcano.sh"},
        "versions": [{"version": "v1beta1", "resources": [{"resource": "podgroups"}]}],
    }
    film.answer("/apis", {**DISCOVERY, "items": [serves]})
    line = film._line("podgroups", f"{VOLCANO_POD_GROUPS.path()}?labelSelector=torchrun-job-name")
    film.lines.append(line | {"first": True, "page": {"metadata": {"resourceVersion": "9"}}})
    player = Player(DEFAULTS)
    await film.decisions(player)
    assert player.ignored == 0
    (informer,) = player._factory.groups.informers
    assert informer.synced.is_set()


async def test_lines_of_unknown_kinds_are_counted() -> None:
    film = Film().starts(job(numNodes=1), queue())
    film.lines.append(film._line("secrets", "/api/v1/secrets") | {"opens": True})
    player = Player(DEFAULTS)
    await film.decisions(player)
    assert player.ignored == 1


async def test_a_bug_is_printed_and_the_replay_continues(monkeypatch: pytest.MonkeyPatch) -> None:
    def decide(observed: Any, *rest: Any, **more: Any) -> Any:
        if observed.job.metadata.name == "bad":
            raise ZeroDivisionError("planted")
        return reconcile(observed, *rest, **more)

    monkeypatch.setattr(play, "reconcile", decide)
    film = Film().starts(job("bad", numNodes=1), job("good", numNodes=1), queue())
    bad, good = await film.decisions()
    out = io.StringIO()
    Printer(out, brief=True).print_decision(bad)
    assert "a bug: ZeroDivisionError: planted" in out.getvalue()
    assert applied(good)


async def test_nodes_are_known_as_in_the_recording() -> None:
    film = Film().starts(job(numNodes=1), queue())
    film.event(NODES, "ADDED", {"metadata": {"name": "n1"}})
    player = Player(DEFAULTS)
    await film.decisions(player)
    view = player._factory.nodes.view
    assert view is not None
    assert [node.metadata.name for node in view] == ["n1"]
    film.now = at(300)
    film.event(PODS, "BOOKMARK", {"metadata": {"name": ""}})
    player = Player(DEFAULTS)
    await film.decisions(player)
    assert player._factory.nodes.view is None


def test_the_same_file_gives_the_same_output_in_any_process(tmp_path: Path) -> None:
    film = Film().starts(*(job(f"job-{n}", numNodes=2) for n in range(5)), queue())
    for name in ("job-0", "job-1"):
        parents = [{"name": "job-2"}, {"name": "job-3"}]
        film.event(TORCHRUN_JOBS, "MODIFIED", job(name, numNodes=2, dependsOn=parents))
    film.event(TORCHRUN_JOBS, "DELETED", job("job-3", numNodes=2))
    (tmp_path / "run").write_bytes(film.file())
    outputs = {
        subprocess.run(
            [sys.executable, "-m", "torchrun_controller.replay", "plans", str(tmp_path / "run")],
            env={**os.environ, "PYTHONHASHSEED": seed, "TZ": zone},
            capture_output=True,
            check=True,
        ).stdout
        for seed, zone in (("1", "UTC"), ("2", "Asia/Tokyo"))
    }
    (output,) = outputs
    assert output.count(b"after torchrunjobs.torchrun.ai/job-3") == 2
