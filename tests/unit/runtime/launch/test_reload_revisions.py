"""All nodes end up with the same code, also if the copy of node 0 is newer than its order."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.gang.leader import NO_PREDECESSOR, STOP_SECONDS
from torchrun_runtime.launch.gang.messages import RoundCode, StartRound, StopRound
from torchrun_runtime.launch.gang.policy import RestartLimits
from torchrun_runtime.launch.gang.rounds import GangNode, OrderInbox, OwnLink, lead
from torchrun_runtime.launch.reload import Reload
from torchrun_runtime.launch.workspace import SharedWorkspace, WorkspaceCopy
from torchrun_runtime.sync.claim import Claim
from unit.runtime.launch.test_served import Cluster
from unit.runtime.launch.test_workspace_revisions import contents, opened, taken
from unit.runtime.virtual_time import Clock


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    cluster = Cluster(tmp_path)
    yield cluster
    cluster.close()


class Leader:
    """Node 0 of a gang. Its copy has revision 1, and its first round runs."""

    def __init__(self, workspace: WorkspaceCopy, podinfo: Path) -> None:
        workspace.update(1)
        self.reload = Reload(workspace, str(podinfo), edit_wait=0.0)
        limits = RestartLimits(0)
        node = GangNode(0, 1, "", 0, "")
        self._rounds = lead(node, limits, lambda: NO_PREDECESSOR, self.reload.announce)
        start = self._rounds.await_start()
        assert start
        assert start.code.revision == 1

    def stop(self) -> StopRound | None:
        return self._rounds.stop_order()

    def next_round(self) -> StartRound:
        """The start of the round after one that ends for newer code."""
        stop = self.stop()
        assert stop
        assert not stop.failed
        self._rounds.end(None, None, stopped=True)
        start = self._rounds.await_start()
        assert start
        assert start.round == stop.round + 1
        return start


def test_all_nodes_follow_node_0_to_the_newest_revision_after_its_own_is_removed(
    tmp_path: Path,
) -> None:
    claim, podinfo = opened(tmp_path / "claim"), tmp_path / "annotations"
    taken(claim, {"a.py": b"1"})
    copies = [SharedWorkspace(str(claim.directory), str(tmp_path / name)) for name in "01"]
    copies[1].update(1)
    leader = Leader(copies[0], podinfo)
    taken(claim, {"a.py": b"2"})
    podinfo.write_text('torchrun.ai/revision="2"\n')
    start = leader.next_round()
    copies[1].update(start.code.revision)
    taken(claim, {"a.py": b"3"})
    taken(claim, {"a.py": b"4"})
    claim.prepare()  # removes revision 2
    leader.reload.update(start)
    podinfo.write_text('torchrun.ai/revision="4"\n')
    start = leader.next_round()
    assert start == StartRound(2, RoundCode(4))
    leader.reload.update(start)
    copies[1].update(start.code.revision)
    assert [copy.revision for copy in copies] == [4, 4]
    assert contents(tmp_path / "0") == contents(tmp_path / "1") == {"a.py": b"4"}
    assert leader.stop() is None


def test_the_main_thread_does_not_wait_for_an_update(tmp_path: Path) -> None:
    claim = opened(tmp_path / "claim")
    taken(claim, {"a.py": b"1"})
    link = OwnLink(GangNode(0, 1, "", 0, ""), RestartLimits(0), OrderInbox())
    looks: list[threading.Thread] = []

    class Workspace(SharedWorkspace):
        def update(self, revision: int = 0, served: str = "") -> None:
            looks.append(threading.Thread(target=reload.announce, args=(link,), daemon=True))
            looks[0].start()
            looks[0].join(60)
            assert not looks[0].is_alive()

    workspace = Workspace(str(claim.directory), str(tmp_path / "app"))
    reload = Reload(workspace, str(tmp_path / "annotations"), edit_wait=0.0)
    reload.update(StartRound(1, RoundCode(1)))
    assert len(looks) == 1


def test_all_nodes_follow_node_0_to_the_code_of_the_serve_pod_that_replaced_its_own(
    cluster: Cluster,
) -> None:
    first = cluster.serve({"a": b"1"})
    cluster.annotate(1, first)
    leader = Leader(cluster.served(first), cluster.podinfo)
    second = cluster.serve({"a": b"2"})
    cluster.urls[1] = "http://127.0.0.1:1"  # deleted
    cluster.annotate(2, second)
    start = leader.next_round()
    assert start.code.revision == 2
    cluster.annotate(3, third := cluster.serve({"a": b"3"}))
    leader.reload.update(start)
    assert cluster.files() == {"a": b"3"}
    start = leader.next_round()
    assert start == StartRound(2, RoundCode(3, f"{cluster.urls[2]} {third.sha256}"))
    leader.reload.update(start)
    assert leader.stop() is None


@pytest.mark.parametrize("is_ordered", [True, False])
def test_code_that_returns_to_that_of_node_0_reaches_nodes_that_may_have_other_code(
    cluster: Cluster, is_ordered: bool
) -> None:
    first = cluster.serve({"a": b"1"})
    cluster.annotate(1, first)
    leader = Leader(cluster.served(first), cluster.podinfo)
    cluster.annotate(2, cluster.serve({"a": b"2"}))
    assert leader.stop() == StopRound(0, failed=False)
    if is_ordered:
        start = leader.next_round()
        assert start.code.revision == 2
    cluster.annotate(3, cluster.serve({"a": b"1"}))
    if is_ordered:
        leader.reload.update(start)
    start = leader.next_round()
    assert start.code == RoundCode(3, f"{cluster.urls[2]} {first.sha256}")
    leader.reload.update(start)
    assert leader.stop() is None


def test_the_rest_of_a_failed_copy_is_fetched_although_the_code_returns_to_the_one_before(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrun_runtime.launch.served._ANNOTATION_SECONDS", 0.0)
    first = cluster.serve({"a": b"1", "z": b"1"})
    cluster.annotate(1, first)
    leader = Leader(cluster.served(first, seconds=0.1), cluster.podinfo)
    cluster.annotate(2, cluster.serve({"a": b"2", "z": b"2"}))
    (cluster.directory / "claim-1/revisions/1/tree/z").write_bytes(b"?")
    with pytest.raises(LaunchError, match="z was damaged"):
        leader.reload.update(leader.next_round())
    assert cluster.files() == {"a": b"2", "z": b"1"}
    cluster.annotate(3, cluster.serve({"a": b"1", "z": b"1"}))
    leader.reload.update(leader.next_round())
    assert cluster.files() == {"a": b"1", "z": b"1"}


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    monkeypatch.setattr("torchrun_runtime.launch.output.time", clock := Clock())
    return clock


def first_leader(directory: Path) -> tuple[Leader, Claim]:
    """A leader with revision 1, and the claim that it has it from."""
    claim = opened(directory / "claim")
    taken(claim, {"a.py": b"1"})
    workspace = SharedWorkspace(str(claim.directory), str(directory / "app"))
    return Leader(workspace, directory / "annotations"), claim


@pytest.fixture
def behind(tmp_path: Path) -> Leader:
    """A leader with revision 1, beside a claim that has revision 2."""
    leader, claim = first_leader(tmp_path)
    taken(claim, {"a.py": b"2"})
    return leader


def test_a_node_reports_its_failure_while_the_others_wait_for_its_ranks_to_stop(
    behind: Leader, clock: Clock
) -> None:
    behind.reload.await_announcement()
    assert 0 < clock.now < STOP_SECONDS


class Announcements(OwnLink):
    """Records what a node announces."""

    def __init__(self) -> None:
        self.codes: list[tuple[RoundCode, float]] = []

    def announce(self, code: RoundCode, edit_wait: float) -> None:
        self.codes.append((code, edit_wait))


def test_a_revision_is_announced_once(behind: Leader, tmp_path: Path) -> None:
    announced = Announcements()
    behind.reload.announce(announced)
    assert announced.codes == [], "the first round has announced revision 1"
    (tmp_path / "annotations").write_text('torchrun.ai/revision="2"\n')
    for _ in range(3):
        behind.reload.announce(announced)
    assert announced.codes == [(RoundCode(2, ""), 0.0)]


def test_without_a_newer_revision_there_is_no_wait(tmp_path: Path, clock: Clock) -> None:
    leader, _ = first_leader(tmp_path)
    leader.reload.await_announcement()
    assert clock.now == 0


def test_the_wait_for_an_announcement_ends_with_it(
    behind: Leader, clock: Clock, tmp_path: Path
) -> None:
    (tmp_path / "annotations").write_text('torchrun.ai/revision="2"\n')
    behind.reload.await_announcement()
    assert clock.now == 0


def test_the_wait_for_an_announcement_ends_with_the_pod(
    behind: Leader, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchrun_runtime.launch.reload.is_stopping", lambda: True)
    behind.reload.await_announcement()
    assert clock.now == 0
