"""The replay of traces of admission."""

import pytest

from torchrun_bench.admission.__main__ import table
from torchrun_bench.admission.measure import jain, measure
from torchrun_bench.admission.traces import TRACES


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_gives_the_same_figures_each_time(name):
    one, other = (measure(TRACES[name](7, 60)) for _ in range(2))
    assert one == other
    assert 0 < one.utilisation <= 1
    assert 0 < one.fairness <= 1


def test_the_table_has_a_row_for_each_trace():
    rows = table(1, 60).splitlines()
    assert [row.split(" | ")[0] for row in rows[2:]] == [f"| {name}" for name in TRACES]


def test_fairness_is_one_where_all_get_the_same():
    assert jain([2.0, 2.0, 2.0]) == 1
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
