"""Shrunk gangs release room on nodes to waiting jobs: nobody else is admitted there before."""

import msgspec
import pytest
from msgspec.structs import replace

from queueing import admitted, admitted_workload, decide, node, nodes, queue, request
from torchrun_api.core import Node
from torchrun_controller.reconcile.admission.model import Decisions, Workload
from torchrun_controller.reconcile.spec.admission_status import charged
from unit.reconcile.admission.classifying import classify_world
from unit.reconcile.admission.test_unused import Pair
from world import World, make_job, make_queue

SHRUNK = admitted_workload("shrunk", "a", 4, 8, shrunk_to=1, pods_by_node={"n000": 1})
QUEUES = [queue("a"), queue("b")]


def released(decisions: Decisions) -> list[tuple[str, int]]:
    return [(one.uid, one.nodes) for one in decisions.releases]


def machines(*ready: bool) -> tuple[Node, ...]:
    """Nodes with room for one pod each, some of which are lost."""
    return tuple(
        msgspec.convert(
            {
                "metadata": {"name": f"n{number}"},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True" if is_ready else "Unknown"}],
                    "allocatable": {"cpu": "8", "pods": "110"},
                },
            },
            Node,
        )
        for number, is_ready in enumerate(ready)
    )


class Nodes(Pair):
    """A gang with one of four nodes, and a job of another queue that waits for three."""

    def __init__(self) -> None:
        super().__init__()
        queue = make_queue(quota={"nodes": 4}, nodeResources={"cpus": "8"})
        other = replace(queue, metadata=replace(queue.metadata, name="other", uid="uid-queue"))
        self.queues = {"gpu": queue, "other": other}
        self.elastic.queue = queue
        self.nodes = machines(True, True, True, True)
        world = self.shrink()
        world.place(world.workers()[0].metadata.name, "n0")
        self.nodes = machines(True, False, False, False)
        world.pass_time(seconds=600)
        world.settle()
        assert len(world.observed().gang.probes) == 3
        job = make_job(numNodes=3, jobQueue="other")
        meta = replace(job.metadata, name="other", uid="uid-other")
        self.other = World(replace(job, metadata=meta), other)
        self.other.now = world.now
        self.worlds.append(self.other)
        self.other.settle()

    def check(self) -> None:
        """The quotas do not matter here."""

    @property
    def charges(self) -> tuple[int, int]:
        return charged(self.elastic.job), charged(self.other.job)


def test_nodes_that_return_are_released_before_another_job_gets_them():
    pair = Nodes()
    pair.coordinate()
    assert (pair.charges, pair.elastic.job.status.admission.limit) == ((4, 0), 0)
    pair.nodes = machines(True, True, True, True)
    pair.coordinate()
    assert (pair.charges, pair.elastic.job.status.admission.limit) == ((4, 0), 1)
    pair.coordinate()
    assert pair.charges == (4, 0), "it may grow before it sees the limit"
    pair.rounds()
    assert pair.charges == (1, 3)
    assert pair.elastic.observed().gang.probes == ()
    assert [len(world.gangs) for world in pair.worlds] == [2, 1]


def test_nodes_that_probes_have_found_are_used_by_their_gang():
    pair = Nodes()
    pair.nodes = machines(True, True, True, True)
    world = pair.elastic
    for number, probe in enumerate(world.observed().gang.probes, 1):
        world.placed(probe.metadata.name)
        world.place(probe.metadata.name, f"n{number}")
    assert classify_world(world).workload.pods_by_node == {f"n{number}": 1 for number in range(4)}
    pair.rounds()
    assert world.gangs[-1].spec.completions == 4
    assert (pair.charges, pair.other.gangs) == ((4, 0), [])


def test_the_room_of_a_shrunk_gang_is_released_before_it_is_admitted():
    decisions = decide(nodes(2), QUEUES, SHRUNK, request("j", "b"))
    assert (admitted(decisions), released(decisions)) == ([], [("shrunk", 1)])
    assert decisions.pending["j"].reason == "WaitingForNodes"
    reported = replace(SHRUNK, admitted=1, shrunk_to=None)
    assert admitted(decide(nodes(2), QUEUES, reported, request("j", "b"))) == ["j"]


def test_other_room_is_used_first():
    decisions = decide(nodes(5), QUEUES, SHRUNK, request("j", "b"))
    assert (admitted(decisions), released(decisions)) == (["j"], [])


def test_no_room_is_released_if_it_is_not_enough():
    full = admitted_workload("full", "b", 1, 8, pods_by_node={"n001": 1})
    decisions = decide(nodes(4), QUEUES, SHRUNK, full, request("j", "b", 3))
    assert (admitted(decisions), released(decisions)) == ([], [])


def test_the_youngest_gangs_release_room_first_and_only_as_many_as_needed():
    young = admitted_workload("young", "a", 3, 8, shrunk_to=1, pods_by_node={"n001": 1})
    old = admitted_workload("old", "a", 3, 8, admitted_for=9, shrunk_to=1, pods_by_node={"n000": 1})
    decisions = decide(nodes(6), QUEUES, old, young, request("j", "b", 2))
    assert released(decisions) == [("young", 1)]
    decisions = decide(nodes(6), QUEUES, old, young, request("j", "b", 3))
    assert released(decisions) == [("old", 1), ("young", 1)]


@pytest.mark.parametrize(
    "shrunk",
    [
        replace(SHRUNK, preempted_for="x"),
        replace(SHRUNK, queue="gone"),
        replace(SHRUNK, is_fixed=True),
    ],
)
def test_gangs_that_do_not_answer_are_not_asked_for_their_room(shrunk: Workload):
    decisions = decide(nodes(4), QUEUES, shrunk, request("j", "b"))
    assert (admitted(decisions), released(decisions)) == ([], [])


def test_a_deleted_gang_keeps_only_the_room_of_its_pods():
    """It creates no larger gang."""
    pods = {"n000": 1, "n001": 1}
    deleted = replace(SHRUNK, shrunk_to=2, is_deleted=True, pods_by_node=pods)
    decisions = decide(nodes(4), QUEUES, deleted, request("j", "b", 2))
    assert (admitted(decisions), released(decisions)) == (["j"], [])
    assert admitted(decide(nodes(4), QUEUES, deleted, request("j", "b", 3))) == []


def test_room_on_nodes_that_the_job_cannot_use_is_not_released():
    zones = tuple(
        replace(one, labels={"zone": "a" if number < 4 else "b"})
        for number, one in enumerate(nodes(5))
    )
    shrunk = replace(SHRUNK, node_selector={"zone": "a"})
    full = admitted_workload("full", "b", 1, 8, pods_by_node={"n004": 1})
    waiting = request("j", "b", node_selector={"zone": "b"})
    assert released(decide(zones, QUEUES, shrunk, full, waiting)) == []


def test_room_is_released_before_any_preemption():
    low = admitted_workload("low", "b", 1, 8, admitted_for=1, pods_by_node={"n004": 1})
    decisions = decide(nodes(5), QUEUES, SHRUNK, low, request("vip", "b", 1, priority=9))
    assert (released(decisions), decisions.preemptions) == ([("shrunk", 1)], ())


def test_room_is_released_before_a_preemption_that_is_needed_as_well():
    """Neither is enough alone. A gang whose room does not help releases nothing."""
    low = admitted_workload("low", "b", 1, 8, admitted_for=1, pods_by_node={"n004": 1})
    vip = request("vip", "b", 4, priority=9)
    other = node("other", labels={"zone": "b"})
    apart = admitted_workload("apart", "a", 2, 4, shrunk_to=1, node_selector={"zone": "b"})
    decisions = decide((*nodes(5), other), QUEUES, SHRUNK, apart, low, vip)
    assert (released(decisions), decisions.preemptions) == ([("shrunk", 1)], ())
    assert decisions.pending["vip"].reason == "WaitingForNodes"
    reported = replace(SHRUNK, admitted=1, shrunk_to=None)
    decisions = decide((*nodes(5), other), QUEUES, reported, apart, low, vip)
    assert (released(decisions), [one.uid for one in decisions.preemptions]) == ([], ["low"])


def test_no_room_is_released_if_it_is_not_enough_even_with_a_preemption():
    low = admitted_workload("low", "b", 1, 8, admitted_for=1, pods_by_node={"n004": 1})
    decisions = decide(nodes(5), QUEUES, SHRUNK, low, request("vip", "b", 5, priority=9))
    assert (released(decisions), decisions.preemptions) == ([], ())


def test_a_preempted_gang_frees_its_room_once():
    """It is not enough twice: as what the gang releases, and as what it leaves."""
    shrunk = replace(SHRUNK, queue="b", nodes=2, admitted=2)
    decisions = decide(nodes(2), QUEUES, shrunk, request("vip", "b", 2, priority=9))
    assert [one.uid for one in decisions.preemptions] == ["shrunk"]
    other = admitted_workload("other", "a", 1, 8, pods_by_node={"n002": 1})
    decisions = decide(nodes(3), QUEUES, shrunk, other, request("vip", "b", 3, priority=9))
    assert (released(decisions), decisions.preemptions) == ([], ())


def test_quota_and_room_are_released_before_a_preemption():
    """The head lacks quota, which a gang of its own queue releases, and room."""
    queues = [queue("a"), queue("b", quota={"nodes": 6})]
    unused = admitted_workload("unused", "b", 3, 8, shrunk_to=1, node_selector={"zone": "b"})
    low = admitted_workload("low", "b", 1, 8, admitted_for=1, pods_by_node={"n004": 1})
    vip = request("vip", "b", 4, priority=9)
    machines = (*nodes(5), *(node(f"b{number}", labels={"zone": "b"}) for number in range(3)))
    selected = tuple(replace(one, labels=one.labels or {"zone": "a"}) for one in machines)
    shrunk, low, vip = (replace(one, node_selector={"zone": "a"}) for one in (SHRUNK, low, vip))
    decisions = decide(selected, queues, shrunk, unused, low, vip)
    assert released(decisions) == [("unused", 1)]
    unused = replace(unused, admitted=1, nodes=1, shrunk_to=None)
    decisions = decide(selected, queues, shrunk, unused, low, vip)
    assert (released(decisions), decisions.preemptions) == ([("shrunk", 1)], ())


def test_a_nominated_job_keeps_the_nodes_that_preempted_jobs_have_left():
    """A gang with room elsewhere may grow onto them: it releases them first."""
    machines = (node("n000"), node("n001", labels={"zone": "a"}), node("n002", 16))
    shrunk = replace(SHRUNK, nodes=2, admitted=2)
    low = request("low", "b", age=1)
    vip = request("vip", "b", priority=9, nominated=True, node_selector={"zone": "a"})
    decisions = decide(machines, QUEUES, shrunk, low, vip)
    assert decisions.pending["vip"].nominated
    assert released(decisions) == [("shrunk", 1)]
    assert decisions.preemptions == ()
    waits = "The job needs 8 GPUs on 1 node. Waiting for elastic jobs to give back unused nodes."
    assert decisions.pending["vip"].message == waits
    reported = replace(shrunk, admitted=1, shrunk_to=None)
    assert "vip" in admitted(decide(machines, QUEUES, reported, low, vip))


def test_a_gang_without_room_does_not_take_the_nodes_of_preempted_jobs():
    """Its probes would get them as soon as they are free."""
    low = admitted_workload("low", "b", 1, 8, pods_by_node={"n001": 1})
    vip = request("vip", "b", 1, priority=9)
    decisions = decide(nodes(2), QUEUES, SHRUNK, low, vip)
    assert [one.uid for one in decisions.preemptions] == ["low"]
    assert released(decisions) == [("shrunk", 1)]
    elsewhere = replace(SHRUNK, node_selector={"zone": "a"})
    assert released(decide(nodes(2), QUEUES, elsewhere, low, vip)) == []


def test_a_head_behind_a_reservation_gets_room_beside_it():
    """The first head waits for zone a, and the second one may use the room in zone b."""
    zones = tuple(
        replace(one, labels={"zone": "a" if number < 2 else "b"})
        for number, one in enumerate(nodes(6))
    )
    shrunk = replace(SHRUNK, pods_by_node={"n002": 1}, node_selector={"zone": "b"})
    full = admitted_workload("full", "a", 2, 8, pods_by_node={"n000": 1, "n001": 1})
    first = request("first", "a", 2, age=9, node_selector={"zone": "a"})
    second = request("second", "b", 1)
    decisions = decide(zones, QUEUES, shrunk, full, first, second)
    assert released(decisions) == [("shrunk", 1)]


class TestReturnedNodes:
    """A gang that has returned nodes asks to grow: it gets none that a waiting head could use."""

    def test_quota_that_a_head_needs(self):
        """Both gangs return nodes for the head, one after the other."""
        queues = [queue("a", quota={"nodes": 12})]
        full = admitted_workload("full", "a", 6, 8, admitted_for=9)
        first = admitted_workload("first", "a", 3, 8, admitted_for=2, shrunk_to=1)
        second = admitted_workload("second", "a", 3, 8, admitted_for=1, shrunk_to=1)
        head = request("head", "a", 4)
        decisions = decide(None, queues, full, first, second, head)
        assert released(decisions) == [("first", 1), ("second", 1)]
        first, returned = replace(first, admitted=1, shrunk_to=None), second
        decisions = decide(None, queues, full, first, returned, head)
        assert (admitted(decisions), released(decisions)) == ([], [("second", 1)])
        returned = replace(second, admitted=1, shrunk_to=None)
        assert admitted(decide(None, queues, full, first, returned, head)) == ["head"]

    def test_room_that_a_head_needs(self):
        full = admitted_workload(
            "full", "a", 3, 8, admitted_for=9, pods_by_node={f"n00{i}": 1 for i in range(3)}
        )
        first = admitted_workload("first", "a", 2, 8, admitted=1, pods_by_node={"n003": 1})
        second = admitted_workload("second", "a", 2, 8, shrunk_to=1, pods_by_node={"n004": 1})
        decisions = decide(nodes(7), QUEUES, full, first, second, request("head", "b", 2))
        assert (admitted(decisions), released(decisions)) == ([], [("second", 1)])
        assert decisions.pending["first"].reason == "WaitingForTurn"

    def test_room_that_a_head_needs_before_it_preempts_for_quota(self):
        queues = [queue("a"), queue("b", quota={"nodes": 3})]
        first = admitted_workload("first", "a", 2, 8, admitted=1, pods_by_node={"n000": 1})
        second = admitted_workload("second", "a", 2, 8, shrunk_to=1, pods_by_node={"n002": 1})
        low = admitted_workload("low", "b", 1, 8, admitted_for=1, pods_by_node={"n004": 1})
        vip = request("vip", "b", 3, priority=9)
        decisions = decide(nodes(5), queues, first, second, low, vip)
        assert (admitted(decisions), released(decisions)) == ([], [("second", 1)])
        second = replace(second, admitted=1, shrunk_to=None)
        decisions = decide(nodes(5), queues, first, second, low, vip)
        assert (admitted(decisions), [one.uid for one in decisions.preemptions]) == ([], ["low"])

    @pytest.mark.parametrize(
        ("cohort", "limits", "grown"),
        [("c", {"gpus": 16}, []), ("d", {"gpus": 16}, ["g"]), ("c", {"nodes": 2}, ["g"])],
    )
    def test_quota_that_a_head_shares(self, cohort: str, limits: dict[str, int], grown: list[str]):
        queues = [
            queue("a", quota={"gpus": 16}, cohort="c"),
            queue("b", quota=limits, cohort=cohort),
        ]
        growing = admitted_workload("g", "a", 2, 8, admitted=1)
        full = admitted_workload("full", "b", 2, 8)
        assert admitted(decide(None, queues, growing, full, request("head", "b", 2))) == grown

    @pytest.mark.parametrize(("zone", "grown"), [("a", []), ("b", ["g"])])
    def test_nodes_that_a_head_could_use(self, zone: str, grown: list[str]):
        machines = tuple(
            replace(one, labels={"zone": "a" if number < 3 else "b"})
            for number, one in enumerate(nodes(6))
        )
        growing = admitted_workload(
            "g", "a", 2, 8, admitted=1, pods_by_node={"n000": 1}, node_selector={"zone": "a"}
        )
        full = admitted_workload(
            "full", "b", 2, 8, pods_by_node={"n002": 1, "n005": 1}, seconds_left=9
        )
        head = request("head", "b", 3, node_selector={"zone": zone})
        assert admitted(decide(machines, QUEUES, growing, full, head)) == grown
