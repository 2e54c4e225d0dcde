"""The simulation of admission, and the page with its figures."""

import json

import pytest

from torchrun_bench.admission.__main__ import FIGURES, PAGE, block
from torchrun_bench.admission.measure import jain, measure
from torchrun_bench.admission.traces import TRACES
from torchrun_bench.admission.variants import VARIANTS


def test_the_page_has_the_figures_that_are_kept():
    assert block(json.loads(FIGURES.read_text())) in PAGE.read_text()


@pytest.mark.parametrize("name", TRACES)
def test_a_seed_gives_the_same_figures_each_time(name):
    one, other = (measure(TRACES[name](7, 60), VARIANTS["nothing"]) for _ in range(2))
    assert one == other
    assert 0 < one.utilisation <= 1
    assert 0 < one.fairness <= 1


@pytest.mark.parametrize("variant", VARIANTS)
def test_each_mechanism_can_be_switched_off(variant):
    assert measure(TRACES["teams"](3, 80), VARIANTS[variant]).utilisation > 0


def test_fairness_is_one_where_all_get_the_same():
    assert jain([2.0, 2.0, 2.0]) == 1
    assert jain([3.0, 0.0, 0.0]) == pytest.approx(1 / 3)
