"""A restart costs each node the same number of messages."""

from torchrun_bench.gang_rounds import measure


def test_each_other_node_gets_two_orders_and_reports_twice() -> None:
    for nodes in (2, 5):
        first, second = measure(nodes, 2)
        assert first.messages == second.messages == 4 * (nodes - 1)
        assert 0 < first.cpu <= first.seconds
