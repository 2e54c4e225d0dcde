"""The table of gang schedulers has an entry for each value of scheduling.gang."""

import ast
from pathlib import Path
from typing import get_args

import torchrun_controller
from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS, GangScheduling
from torchrun_controller.reconcile.schedulers.table import API_GROUPS, GROUP_KINDS, SCHEDULERS


def test_every_value_of_the_api_has_its_scheduler():
    assert set(SCHEDULERS) == set(get_args(GangScheduling))
    assert all(GANG_SCHEDULERS[name] is scheduler.api for name, scheduler in SCHEDULERS.items())


def test_an_api_group_is_that_of_the_kinds():
    for scheduler in SCHEDULERS.values():
        if scheduler.api.api_group:
            assert {kind.group for kind in scheduler.kinds} == {scheduler.api.api_group}


def test_what_admits_jobs_has_a_reason_for_those_that_wait():
    for scheduler in SCHEDULERS.values():
        assert bool(scheduler.waiting_reason) is scheduler.api.admits_jobs


def test_no_other_file_of_the_controller_names_a_scheduler():
    folder = Path(torchrun_controller.__file__).parent
    own = {*(folder / "reconcile" / "schedulers").iterdir(), folder / "reconcile/queue/kai.py"}
    names = {*get_args(GangScheduling)} - {"none", "native"}
    for path in {*folder.rglob("*.py")} - own:
        nodes = ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        strings = {node.value for node in nodes if isinstance(node, ast.Constant)}
        assert not strings & names, path


def test_required_kinds_are_discovered_and_have_an_install_hint():
    for scheduler in SCHEDULERS.values():
        assert bool(scheduler.kinds) is bool(scheduler.install_hint)
        assert {kind.api_version.partition("/")[0] for kind in scheduler.kinds} <= API_GROUPS
        assert set(scheduler.kinds) <= set(GROUP_KINDS)
