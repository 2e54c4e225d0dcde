"""The leader is killed fifty times under 200 running jobs: nothing is lost or done twice.

Pods are kwok's; scheduler and Job controller are real. Every job has a script: the number of gangs
that fail before one succeeds. The checks read the history of jobs, child Jobs and pods, and the
audit log of the API server. `make ha` runs it with short leases. test_high_availability.py measures
a take-over with the default lease.
"""

import os
import random
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from e2e.history import History
from integration.audit import AuditLog, tenures, without_lease
from integration.background import repeating
from integration.controller_process import Api, eventually, install_crds
from integration.kwok import playing
from integration.replicas import Replicas, identity, lasting
from integration.team import TERMINAL, Team, trains
from torchrun_api import names
from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS
from torchrun_cluster import LocalCluster, Size

QUICK = lasting("4s", "3s", "500ms")  # a busy machine may lose even these, which is allowed
KILLS = int(os.environ.get("TORCHRUN_TEST_KILLS", "50"))
RUNNING = int(os.environ.get("TORCHRUN_TEST_JOBS", "200"))
REPLICAS = 3
NODES = 6
NARROW = 6  # the quota of the queue `narrow`, in jobs
STAGES = Path(__file__).parents[1] / "e2e" / "kwok.yaml"
ENDS = "torchrun-e2e/ends"


class Script(NamedTuple):
    """A job whose first gangs fail, and whose next one succeeds. `lasting`: at the end of the test."""

    nodes: int
    failures: int
    lasting: bool


@pytest.fixture(scope="module")
def cluster(audit: AuditLog, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LocalCluster]:
    name, extra = f"test-kills-{os.getpid()}", {"kube-apiserver": audit.flags}
    with LocalCluster(
        name=name, size=Size.CONTROL_PLANE, scheduler=True, extra_args=extra
    ) as running:
        install_crds(running)
        with playing(
            running, tmp_path_factory.mktemp("kwok"), "--manage-all-nodes", stages=(STAGES,)
        ):
            yield running


class Life:
    """Submits jobs, and ends their pods by their scripts."""

    def __init__(self, team: Team, chance: random.Random) -> None:
        self.scripts: dict[str, Script] = {}
        self._team, self._chance = team, chance
        self._due: dict[tuple[str, int], float] = {}
        self._told: set[tuple[str, int]] = set()
        self.finale = threading.Event()

    @contextmanager
    def going_on(self) -> Iterator["Life"]:
        """Run until the end of the block. Raises the first error."""
        with repeating(self._play, 0.5):
            yield self

    def submit(self, name: str, script: Script) -> None:
        """Submit a job."""
        self.scripts[name] = script
        queue = "research" if script.lasting else "narrow"
        reliability = {"maxRestarts": 5}
        self._team.submit(name, jobQueue=queue, numNodes=script.nodes, reliability=reliability)

    def running(self) -> int:
        """The number of running jobs."""
        jobs = self._team.api.items(f"{self._team.group}/torchrunjobs")
        return sum(job.get("status", {}).get("phase") == "Running" for job in jobs)

    def _play(self) -> None:
        for job, (attempt, pods) in self._team.newest_gangs().items():
            if job in self.scripts:  # the job `taken` has none
                self._end(job, attempt, pods)
        self._keep_busy()

    def _end(self, job: str, attempt: int, pods: list[Any]) -> None:
        script, gang = self.scripts[job], (job, attempt)
        if (
            len(pods) < script.nodes
            or gang in self._told
            or not all(trains(pod, pods) for pod in pods)
        ):
            return
        fails = attempt < script.failures
        longest = 60.0 if script.lasting else 3.0
        due = self._due.setdefault(gang, time.monotonic() + self._chance.random() * longest)
        if not fails and script.lasting and not self.finale.is_set():
            return
        if time.monotonic() < due and not self.finale.is_set():
            return
        self._told.add(gang)
        phase = "Failed" if fails else "Succeeded"
        for pod in pods[:1] if fails else pods:
            path = f"{self._team.core}/pods/{pod['metadata']['name']}"
            self._team.api.patch(path, {"metadata": {"annotations": {ENDS: phase}}})

    def _keep_busy(self) -> None:
        """Keep some short jobs, more than the quota of their queue."""
        if self.finale.is_set():
            return
        jobs = self._team.api.items(f"{self._team.group}/torchrunjobs")
        live = sum(
            not self.scripts[job["metadata"]["name"]].lasting
            and job.get("status", {}).get("phase") not in TERMINAL
            for job in jobs
            if job["metadata"]["name"] in self.scripts
        )
        for _ in range(2 * NARROW - live):
            number = len(self.scripts)
            script = Script(self._chance.choice((1, 2)), self._chance.choice((0, 0, 1)), False)
            self.submit(f"short-{number}", script)


@pytest.mark.long
@pytest.mark.timeout(1500)
def test_the_leader_is_killed_again_and_again(
    cluster: LocalCluster, api: Api, audit: AuditLog, tmp_path: Path
) -> None:
    seed = int(os.environ.get("TORCHRUN_TEST_SEED", random.randrange(2**32)))
    print(f"TORCHRUN_TEST_SEED={seed}")
    chance = random.Random(seed)
    for number in range(NODES):
        name = f"node-{number}"
        labels = {"kubernetes.io/hostname": name}
        api.create("/api/v1/nodes", {"metadata": {"name": name, "labels": labels}})
    team = Team(api)
    team.make_queue()
    narrow = {"quota": {"jobs": NARROW}}
    team.make_queue("narrow", **narrow)
    foreign = strangers(team)
    replicas = Replicas(cluster, team, tmp_path, REPLICAS, *QUICK)
    life = Life(team, chance)
    with ExitStack() as stack:
        jobs, children, pods = (
            stack.enter_context(History(api.client, kind, team.name).running())
            for kind in (TORCHRUN_JOBS, JOBS, PODS)
        )
        stack.enter_context(replicas.running_with_restarts())
        stack.enter_context(life.going_on())
        for number in range(RUNNING * 6 // 5):  # some are always between two gangs
            failures = chance.choice((0, 0, 1, 2))
            life.submit(f"lasting-{number}", Script(1 + (number % 5 == 0), failures, True))
        eventually(f"{RUNNING} jobs run", lambda: life.running() >= RUNNING, 240)
        kill(replicas, life, chance)
        life.finale.set()
        finished(team, life)
    print(f"{len(life.scripts)} jobs, {len(pods.uids())} pods")
    for name, script in life.scripts.items():
        assert_lived(name, script, jobs, children, pods)
    assert_never_more_than(NARROW, jobs)
    assert strangers_now(team) == foreign
    writes = audit.writes()
    ours = set(children.uids()) | set(life.scripts)
    written = {w.name for w in writes if w.resource in ("jobs", "services", "torchrunjobs/status")}
    assert written <= {*ours, "taken"}
    assert without_lease(writes) == []
    print(f"{len(writes)} writes by {len({t.who for t in tenures(writes) if t.who})} leaders")


def kill(replicas: Replicas, life: Life, chance: random.Random) -> None:
    """Kill the leader with SIGKILL, KILLS times. The process restarts at once, as a pod would."""
    seconds, running = [], []
    while len(seconds) < KILLS:
        replicas.leader()
        time.sleep(chance.random() * 1.5)
        leader = replicas.leader()
        old, began = identity(leader), time.monotonic()
        if old != replicas.holder:
            continue  # it has just lost the lease without a kill
        leader.kill()
        replicas.leader(other_than=old)
        seconds.append(time.monotonic() - began)
        running.append(life.running())
    seconds.sort()
    middle, longest = seconds[len(seconds) // 2], seconds[-1]
    print(
        f"{KILLS} kills: the next one led after {middle:.1f} s (median), {longest:.1f} s (longest)"
    )
    print(f"jobs that ran at a kill: {min(running)} to {max(running)}")


def finished(team: Team, life: Life) -> None:
    """Wait until every job has ended."""

    def look() -> bool:
        jobs = team.api.items(f"{team.group}/torchrunjobs")
        ended = {
            job["metadata"]["name"]
            for job in jobs
            if job.get("status", {}).get("phase") in TERMINAL
        }
        return set(life.scripts) <= ended

    eventually("every job has ended", look, 400)


def assert_lived(
    name: str, script: Script, jobs: History, children: History, pods: History
) -> None:
    """Check that the job had exactly the attempts of its script, each created once."""
    states = [state.get("status", {}) for state in jobs.states(name)]
    last, failures = states[-1], script.failures
    assert last["phase"] == "Succeeded", (name, last)
    counted = (last.get("attempt", 0), last.get("restarts", 0), last.get("disruptions", 0))
    assert counted == (failures, failures, 0), (name, last)
    attempts = [state.get("attempt", 0) for state in states]
    # The status may skip an attempt: its leader was killed before the write, and that gang had
    # ended when the next leader started. The list of attempts still has it, see below.
    assert attempts == sorted(attempts), (name, attempts)
    numbers = [ended.get("number", 0) for ended in last.get("attempts", ()) if ended.get("counted")]
    assert numbers == list(range(failures)), (name, last)
    phases = jobs.phases(name, "Succeeded")
    assert [phase for phase in phases if phase in TERMINAL] == ["Succeeded"], (name, phases)
    creations: Counter[int] = Counter()
    for state in {s["metadata"]["uid"]: s for s in children.states()}.values():
        labels = state["metadata"].get("labels", {})
        if labels.get(names.JOB_LABEL) == name:
            creations[int(labels[names.ATTEMPT_LABEL])] += 1
    assert creations == dict.fromkeys(range(failures + 1), 1), (name, creations)
    workers: Counter[int] = Counter()
    for state in {s["metadata"]["uid"]: s for s in pods.states()}.values():
        labels = state["metadata"].get("labels", {})
        if labels.get(names.JOB_LABEL) == name:
            workers[int(labels[names.ATTEMPT_LABEL])] += 1
    assert workers == dict.fromkeys(range(failures + 1), script.nodes), (name, workers)


def assert_never_more_than(most: int, jobs: History) -> None:
    """Check that the queue `narrow` never had more admitted jobs than its quota."""
    admitted: set[str] = set()
    for state in jobs.states():
        if state["spec"]["jobQueue"] != "narrow":
            continue
        status, name = state.get("status", {}), state["metadata"]["name"]
        conditions = {c["type"]: c["status"] for c in status.get("conditions", ())}
        if conditions.get("Admitted") == "True" and status.get("phase") not in TERMINAL:
            admitted.add(name)
        else:
            admitted.discard(name)
        assert len(admitted) <= most, sorted(admitted)


def strangers(team: Team) -> dict[str, str]:
    """Objects of other owners, one with a name that a job needs."""
    meta = {"metadata": {"name": "stranger"}}
    team.api.create(f"{team.core}/configmaps", {**meta, "data": {"a": "b"}})
    port = {"ports": [{"port": 80}]}
    for name in ("stranger", "taken"):
        team.api.create(f"{team.core}/services", {"metadata": {"name": name}, "spec": port})
    team.submit("taken")
    return strangers_now(team)


def strangers_now(team: Team) -> dict[str, str]:
    paths = ("configmaps/stranger", "services/stranger", "services/taken")
    return {
        path: team.api.get(f"{team.core}/{path}")["metadata"]["resourceVersion"] for path in paths
    }
