"""Two replicas: after any fault of the leader the other takes over, and nothing is created twice.

The audit log measures a take-over, from the fault to the first write of the next leader. A stream
of jobs makes sure that there is always something to write.
"""

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime
from pathlib import Path

import pytest

from integration.audit import AuditLog, Write, count_creations, tenures, without_lease
from integration.background import repeating
from integration.controller_process import eventually, install_crds
from integration.relay import Relay
from integration.replicas import Replicas, Stream, identity, lasting, ready
from integration.team import Team
from torchrun_cluster import LocalCluster, Size

# Short enough for a test, but a leader that stalls for half of it keeps the lease.
QUICK = lasting("12s", "8s", "2s")
# The controller, whose first decision about the job `slow` takes longer than the renew deadline.
SLOW_DECISION = """
import time
from torchrun_controller import __main__, manager

decide = manager.reconcile_logged
began = []

def decide_slowly(observed, now, defaults):
    if observed.job.metadata.name == "slow" and not began:
        began.append(time.monotonic())
        print('{"message": "blocked"}', flush=True)
        while time.monotonic() < began[0] + 12:
            pass
        print('{"message": "continued"}', flush=True)
    return decide(observed, now, defaults)

manager.reconcile_logged = decide_slowly
__main__.main()
"""
# Seconds until the next leader. The defaults hold on any machine, and only separate the causes.
ANY = 120.0


@pytest.fixture(scope="module")
def cluster(audit: AuditLog) -> Iterator[LocalCluster]:
    name, extra = f"test-ha-{os.getpid()}", {"kube-apiserver": audit.flags}
    with LocalCluster(name=name, size=Size.CONTROL_PLANE, extra_args=extra) as running:
        install_crds(running)
        yield running


class Observed:
    """The audit log of one test.

    The API server may log a request of the previous test after its replica was killed.
    """

    def __init__(self, audit: AuditLog, team: Team) -> None:
        self._audit, self._team = audit, team
        self._start = audit.size()
        self._earlier = {write.who for write in audit.writes()} if self._start else set()

    def writes(self) -> list[Write]:
        return [w for w in self._audit.writes(self._start) if w.who not in self._earlier]

    def first_write(self, who: str) -> float:
        """The time of the first write of this process, except for the lease."""

        def look() -> float | None:
            writes = (w for w in self.writes() if w.who == who and w.resource != "leases")
            return next((write.began for write in writes), None)

        return eventually(f"a write of {who}", look)

    def check(self, submitted: list[str], *, frozen: bool) -> None:
        """Check that every job has one child Job, created once, and that all writes had the lease."""
        jobs = f"{self._team.batch}/jobs"
        eventually(
            "a Job for each",
            lambda: {j["metadata"]["name"] for j in self._team.api.items(jobs)} == set(submitted),
        )
        # The API server logs a request after it has taken effect.
        eventually(
            "each is in the audit log",
            lambda: set(count_creations(self.writes(), "jobs")) == set(submitted),
        )
        writes = self.writes()
        created = count_creations(writes, "jobs")
        not_once = [w for w in writes if w.resource == "jobs" and created[w.name] != 1]
        assert not_once == []
        assert without_lease(writes, frozen=frozen) == []
        others = len({w.who for w in writes if w.resource != "leases"})
        print(f"{len(writes)} writes of {others} leaders, {len(submitted)} jobs")


@pytest.fixture
def observed(audit: AuditLog, team: Team) -> Observed:
    return Observed(audit, team)


@contextmanager
def at_work(
    replicas: Replicas, stream: Stream, observed: Observed, *, frozen: bool = False
) -> Iterator[Replicas]:
    """Run the replicas and a stream of jobs until the end of the block, and check the result."""
    with replicas.running():
        with stream.running():
            yield replicas
        observed.check(stream.names, frozen=frozen)


def took(observed: Observed, replicas: Replicas, old: str, began: float, what: str) -> float:
    """Print and return the seconds from `began` to the first write of the next leader."""
    new = identity(replicas.leader(other_than=old))
    seconds = observed.first_write(new) - began
    print(f"{what}: the next leader's first write {seconds:.3f} s later")
    return seconds


@pytest.mark.parametrize(
    ("tries", "limit"),
    [(1, ANY), pytest.param(5, 20, marks=[pytest.mark.long, pytest.mark.timeout(400)])],
)
def test_a_killed_leader_is_replaced_within_20_seconds(
    tries: int, limit: float, cluster: LocalCluster, team: Team, observed: Observed, tmp_path: Path
) -> None:
    with at_work(Replicas(cluster, team, tmp_path, 2), Stream(team), observed) as replicas:
        for _ in range(tries):
            leader = replicas.leader()
            old, began = identity(leader), time.time()
            leader.kill()
            replicas.revive()
            seconds = took(observed, replicas, old, began, "killed")
            assert seconds < limit
            renewed = max(w.ended for w in observed.writes() if w.who == old and w.takes_lease)
            assert began + seconds - renewed > 10, "the lease was still valid"


@pytest.mark.parametrize(
    ("tries", "limit"),
    [(2, ANY), pytest.param(20, 2, marks=[pytest.mark.long, pytest.mark.timeout(400)])],
)
def test_a_terminated_leader_is_replaced_within_2_seconds(
    tries: int, limit: float, cluster: LocalCluster, team: Team, observed: Observed, tmp_path: Path
) -> None:
    with at_work(Replicas(cluster, team, tmp_path, 2), Stream(team), observed) as replicas:
        for _ in range(tries):
            leader = replicas.leader()
            old, began = identity(leader), time.time()
            leader.send(signal.SIGTERM)
            assert took(observed, replicas, old, began, "SIGTERM") < limit
            assert leader.wait() == 0
            assert any(w.who == old and w.releases_lease for w in observed.writes())
            replicas.revive()
            ready(leader)


@pytest.mark.parametrize(
    "tries", [1, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(400)])]
)
def test_a_frozen_leader_has_one_request_left_at_most(
    tries: int, cluster: LocalCluster, team: Team, observed: Observed, tmp_path: Path
) -> None:
    two, stream = Replicas(cluster, team, tmp_path, 2, *QUICK), Stream(team, pause=0.01)
    with at_work(two, stream, observed, frozen=True) as replicas:
        for _ in range(tries):
            leader = replicas.leader()
            old, began = identity(leader), time.time()
            leader.send(signal.SIGSTOP)
            # A busy machine may lose such a short lease at times, also the other replica.
            with repeating(replicas.revive, 0.2):
                took(observed, replicas, old, began, "frozen")
            leader.send(signal.SIGCONT)
            assert leader.wait() == 1
            assert leader.lines()[-1]["message"] == "exiting: another replica may lead"
            replicas.revive()
            for replica in replicas.all:
                ready(replica)


def test_a_slow_decision_keeps_the_lease(
    cluster: LocalCluster, team: Team, observed: Observed, tmp_path: Path
) -> None:
    replicas = Replicas(cluster, team, tmp_path, 2, *QUICK)
    for replica in replicas.all:
        replica.with_program(SLOW_DECISION)
    with replicas.running():
        leader = replicas.leader()
        began = identity(leader)
        team.submit("slow", numNodes=1)
        leader.wait_for_line("blocked")
        leader.wait_for_line("continued")
        observed.check(["slow"], frozen=False)
        assert [tenure.who for tenure in tenures(observed.writes())] == [began]
        assert replicas.leader() is leader


def test_a_disconnected_leader_ends_before_another_leads(
    cluster: LocalCluster, team: Team, observed: Observed, tmp_path: Path
) -> None:
    # A process that stalls between the deadline and the end of the lease still ends first.
    lease = lasting("30s", "12s", "2s")
    replicas, stream = Replicas(cluster, team, tmp_path, 2, *lease), Stream(team)
    with Relay(cluster, tmp_path).running() as relay:
        cut_off = replicas.all[0]
        cut_off.through(relay.kubeconfig)
        cut_off.start()
        cut_off.wait_for_line("controllers started")
        with at_work(replicas, stream, observed):
            assert replicas.leader() is cut_off
            old, began = identity(cut_off), time.time()
            relay.cut()
            assert cut_off.wait() == 1
            last = cut_off.lines()[-1]
            assert last["message"] == "exiting: another replica may lead"
            took(observed, replicas, old, began, "cut off")
            observed_tenures = list(tenures(observed.writes()))
            following = observed_tenures[[tenure.who for tenure in observed_tenures].index(old) + 1]
            assert datetime.fromisoformat(last["time"]).timestamp() < following.since
            relay.heal()
            cut_off.start()
            ready(cut_off)
