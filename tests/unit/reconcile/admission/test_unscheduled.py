"""Pods without a node, of jobs whose queue takes no part in admission."""

from msgspec.structs import replace

from queueing import admitted, admitted_workload, decide, nodes, queue, request

PLAIN = admitted_workload("plain", "without-quota", 4, admitted_for=9)
MORE = "Pods without a machine come first, of jobs that need no admission: team/plain."


def test_a_gang_that_can_never_fit_takes_no_nodes():
    for pods_by_node, room in (({}, 3), ({"n000": 1}, 2)):
        plain = replace(PLAIN, pods_by_node=pods_by_node)
        asked = [request(f"j{number}", "a") for number in range(3)]
        assert len(admitted(decide(nodes(3), [queue("a")], plain, *asked))) == room


def test_a_gang_that_fits_takes_its_nodes_and_is_named():
    decisions = decide(nodes(4), [queue("a")], PLAIN, request("j", "a"))
    assert admitted(decisions) == []
    assert decisions.pending["j"].message == (
        f"The job needs 8 GPUs on 1 node. Machines that are ready have room for 0 of 1 pod. {MORE}"
    )


def test_a_job_that_waits_to_grow_has_the_same_reason():
    growing = admitted_workload("j", "a", 2, admitted=1, pods_by_node={"n000": 1})
    decisions = decide(nodes(4), [queue("a")], PLAIN, growing)
    assert decisions.pending["j"].message.endswith(MORE)


def test_gangs_with_nodes_and_admitted_gangs_are_not_named():
    placed = replace(PLAIN, pods_by_node={f"n{number:03}": 1 for number in range(4)})
    for running in (placed, replace(PLAIN, queue="a")):
        decisions = decide(nodes(4), [queue("a")], running, request("j", "a"))
        assert decisions.pending["j"].message.endswith("have room for 0 of 1 pod.")
