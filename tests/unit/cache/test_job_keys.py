"""Which change wakes which job: the rules by kind, and the jobs on both sides of dependsOn."""

import msgspec
import pytest

from torchrun_api.kinds.core import CoreEvent, Pod
from torchrun_api.kinds.resources import PODS
from torchrun_controller.cache.job_keys import RULES, affected_dependents, finished_parents
from torchrun_controller.cache.observe import Caches, empty_caches
from torchrun_controller.cache.store import Change
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS
from unit.cache.test_informer_factory import World, a_job, a_queue
from unit.cache.test_observe import follower


@pytest.fixture
def world() -> World:
    return World()


@pytest.fixture
def caches() -> Caches:
    return empty_caches()


def test_each_watched_kind_has_one_rule(world: World) -> None:
    kinds = [kind for row, _ in RULES for kind in row]
    assert len(kinds) == len(set(kinds))
    watched = {informer.kind for informer in world.factory.informers}
    groups = {kind for scheduler in SCHEDULERS.values() for kind in scheduler.kinds}
    assert set(kinds) == watched | groups


def test_a_job_wakes_itself(world: World) -> None:
    world.change(a_job("run"))
    assert world.keys() == [("team", "run")]


def test_a_child_wakes_the_job_on_its_label(world: World) -> None:
    labels = {"torchrun-job-name": "run"}
    meta = {"name": "run-0-abcde", "namespace": "team", "labels": labels}
    world.change(msgspec.convert({"metadata": meta}, Pod))
    assert world.keys() == [("team", "run")]


def test_a_queue_wakes_its_unfinished_jobs(world: World) -> None:
    world.change(a_job("waits", phase="Pending"))
    world.change(a_job("runs", phase="Running"))
    world.change(a_job("is-done", phase="Succeeded"))
    world.change(a_job("elsewhere", queue="production"))
    world.keys()
    world.change(a_queue())
    assert world.keys() == [("team", "waits"), ("team", "runs")]


def test_a_queue_of_another_namespace_wakes_no_job(world: World) -> None:
    world.change(a_job("run"))
    world.keys()
    world.change(a_queue("other"))
    assert world.keys() == []


@pytest.mark.parametrize(
    ("kind", "name", "keys"),
    [
        ("Pod", "run-0-abcde", [("team", "run")]),
        ("Pod", "not-ours", []),
        ("Node", "run-0-abcde", []),
    ],
)
def test_a_warning_wakes_the_job_of_its_object(
    world: World, kind: str, name: str, keys: list[tuple[str, str]]
) -> None:
    meta = {
        "name": "run-0-abcde",
        "namespace": "team",
        "labels": {"torchrun-job-name": "run"},
    }
    world.change(msgspec.convert({"metadata": meta}, Pod))
    world.keys()
    regarding = {"kind": kind, "namespace": "team", "name": name}
    event = {"metadata": {"name": "e", "namespace": "team"}, "involvedObject": regarding}
    world.change(msgspec.convert(event, CoreEvent))
    assert world.keys() == keys


def test_a_changed_label_of_a_child_wakes_both_jobs(world: World) -> None:
    def a_pod(job: str) -> Pod:
        meta = {"name": "p", "namespace": "team", "labels": {"torchrun-job-name": job}}
        return msgspec.convert({"metadata": meta}, Pod)

    world.factory._handle_change(PODS, Change(a_pod("train"), a_pod("other")), False)
    assert sorted(world.keys()) == [("team", "other"), ("team", "train")]
    world.factory._handle_change(PODS, Change(a_pod("other"), a_pod("other")), False)
    assert world.keys() == [("team", "other")]


def test_a_step_of_a_parent_wakes_its_children_and_an_edit_all_that_follow(caches):
    for job in (follower("b", "a"), follower("c", "b"), follower("d", "c")):
        caches.jobs.upsert(job, 1)
    before = follower("a", phase="Running")
    counted = follower("a", phase="Running", restarts=3)
    assert affected_dependents(caches.jobs, Change(before, counted)) == set()
    assert affected_dependents(caches.jobs, Change(before, follower("a", phase="Failed"))) == {"b"}
    assert affected_dependents(caches.jobs, Change(before, None)) == {"b"}
    cycle = follower("a", "d", phase="Running")
    caches.jobs.upsert(cycle, 2)
    assert affected_dependents(caches.jobs, Change(before, cycle)) == {"b"}


@pytest.mark.parametrize(
    ("new", "woken"),
    [
        (follower("b", "a", "c", phase="Queued"), set()),
        (follower("b", "a", "c", phase="Queued", restarts=1), set()),
        (follower("b", "a", "c", dependenciesMet=[{"name": "a", "condition": "Succeeded"}]), {"a"}),
        (follower("b", "a", "c", phase="Failed"), {"a"}),
        (follower("b", "c"), {"a"}),
        (None, {"a"}),
    ],
)
def test_a_record_of_a_dependent_wakes_its_finished_parents(caches, new, woken):
    for job in (follower("a", phase="Succeeded"), follower("c", phase="Running")):
        caches.jobs.upsert(job, 1)
    old = follower("b", "a", "c")
    assert finished_parents(caches.jobs, Change(old, new)) == woken
    assert finished_parents(caches.jobs, Change(None, old)) == set()
