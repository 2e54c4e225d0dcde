"""The environment contract: one declaration for each variable, and no literal names elsewhere."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_api.contract.launch import ATTEMPT, COMMAND, NODE_RANK, TERMINATION_LOG
from torchrun_api.contract.variable import env_vars
from torchrun_api.generate.contract_reference import VARIABLES, launcher_module, main, page, usage

ROOT = Path(__file__).parents[3]
RUNTIME = ROOT / "runtime/torchrun_runtime"
RECONCILE = ROOT / "controller/torchrun_controller/reconcile"
CONTRACT = RUNTIME / "launch/contract.py"
PAGE = ROOT / "docs/environment.md"
# These programs run where the modules of the launcher cannot be imported.
ALONE = {RUNTIME / "launch/__main__.py", *(RUNTIME / "launch/rank").glob("*.py")}
NAME = re.compile(r"(TORCHRUN|PET)_[A-Z0-9_]*")


def names_in(path: Path) -> Iterator[str]:
    """Variables in the strings of a module."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            if NAME.fullmatch(node.value):
                yield node.value
        elif isinstance(node, ast.keyword) and node.arg and NAME.fullmatch(node.arg):
            yield node.arg


def test_the_committed_files_are_the_generated_ones(tmp_path: Path) -> None:
    written = tmp_path / "contract.py", tmp_path / "environment.md"
    main(*map(str, written))
    assert written[0].read_text(encoding="utf-8") == launcher_module()
    assert written[1].read_text(encoding="utf-8") == page()
    for committed, generated in zip((CONTRACT, PAGE), written, strict=True):
        assert committed.read_text() == generated.read_text(), "run: make generate"


def test_each_variable_is_declared_once() -> None:
    declared = [variable.name for variable in VARIABLES.values()]
    assert len({*declared}) == len(declared)
    for name in declared:
        assert page().count(f"| `{name}` |") == 1


@pytest.mark.parametrize(
    "path",
    [
        path
        for room in (RUNTIME, RECONCILE)
        for path in sorted(room.rglob("*.py"))
        if path != CONTRACT
    ],
    ids=lambda path: str(path.relative_to(ROOT)),
)
def test_names_come_from_the_contract(path: Path) -> None:
    declared = {variable.name for variable in VARIABLES.values()}
    assert {*names_in(path)} <= (declared if path in ALONE else set())


def test_values_have_the_format_of_their_readers() -> None:
    assert env_vars(
        ATTEMPT.env_var(2), TERMINATION_LOG.env_var(None), COMMAND.env_var(["echo", "ü"])
    ) == [
        {"name": "TORCHRUN_ATTEMPT", "value": "2"},
        {"name": "TORCHRUN_COMMAND", "value": '["echo","ü"]'},
    ]
    index = {"fieldRef": {"fieldPath": "metadata.name"}}
    assert NODE_RANK.env_var_of_field("metadata.name") == {"name": "NODE_RANK", "valueFrom": index}
    assert TERMINATION_LOG.read({}) == "/dev/termination-log"
    assert TERMINATION_LOG.read({"TORCHRUN_TERMINATION_LOG": ""}) == ""


def test_a_program_lists_what_it_reads() -> None:
    lines = usage("serve pod").splitlines()
    assert "  TORCHRUN_SERVE_PORT (8081)  Port to listen on." in lines
    assert not any("SYNC" in line for line in lines)
