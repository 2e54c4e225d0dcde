"""The table of gang schedulers has an entry for each value of scheduling.gang."""

from typing import get_args

from torchrun_api.admission import GangScheduling
from torchrun_controller.reconcile.schedulers.table import API_GROUPS, GROUP_KINDS, SCHEDULERS


def test_every_value_of_the_api_has_its_scheduler():
    assert set(SCHEDULERS) == set(get_args(GangScheduling))
    assert all(name == scheduler.name for name, scheduler in SCHEDULERS.items())


def test_what_a_scheduler_needs_is_looked_up_and_can_be_installed():
    for scheduler in SCHEDULERS.values():
        assert bool(scheduler.kinds) is bool(scheduler.install_hint)
        assert {kind.api_version.partition("/")[0] for kind in scheduler.kinds} <= API_GROUPS
        assert set(scheduler.kinds) <= set(GROUP_KINDS)
