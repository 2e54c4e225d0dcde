"""Random histories of jobs in two queues, with a controller that is late or killed."""

import itertools
import random

import pytest

from queue_lab import Lab


@pytest.mark.parametrize("seed", range(40))
def test_quotas_hold_at_any_time_and_every_job_is_admitted(seed):
    lab = Lab(random.Random(seed), jobs=8)
    for _ in range(80):
        lab.turn()
    lab.finish()


def test_the_histories_include_preemption():
    labs = (Lab(random.Random(seed), jobs=8) for seed in itertools.count())
    for lab in itertools.islice(labs, 5):
        for _ in range(80):
            lab.turn()
        if lab.preempted:
            return
    raise AssertionError("nobody ever had to give way")
