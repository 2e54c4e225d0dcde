"""The capabilities that a machine lacks are removed from what runc is asked to run."""

import json
from pathlib import Path

import pytest

from torchrun_cluster import capped_runc
from torchrun_cluster.capped_runc import missing_capabilities

MISSING = frozenset({"CAP_SYS_RESOURCE"})
SETS = ("bounding", "effective", "permitted")


def process(*capabilities: str) -> dict[str, object]:
    sets = {name: list(capabilities) for name in SETS}
    return {"args": ["sh"], "capabilities": sets}


def test_the_bounding_set_names_what_is_missing() -> None:
    assert missing_capabilities("Name:\tsh\nCapBnd:\t000001fffeffffff\n") == MISSING
    assert missing_capabilities("CapBnd:\t000001ffffffffff\n") == frozenset()
    assert len(missing_capabilities("CapBnd:\t0000000000000000\n")) == 41


@pytest.mark.parametrize("flag", ["--bundle", "-b"])
def test_a_container_is_created_without_them(tmp_path: Path, flag: str) -> None:
    config = tmp_path / "config.json"
    spec = {"process": process("CAP_CHOWN", "CAP_SYS_RESOURCE"), "root": {"path": "rootfs"}}
    config.write_text(json.dumps(spec))
    capped_runc.edit(["--root", "/run/runc", "create", flag, str(tmp_path), "id"], MISSING)
    assert json.loads(config.read_text()) == {**spec, "process": process("CAP_CHOWN")}


@pytest.mark.parametrize("flag", ["--process", "-p"])
def test_a_process_is_executed_without_them(tmp_path: Path, flag: str) -> None:
    file = tmp_path / "process.json"
    file.write_text(json.dumps(process("CAP_SYS_RESOURCE", "CAP_KILL")))
    capped_runc.edit(["exec", flag, str(file), "id"], MISSING)
    assert json.loads(file.read_text()) == process("CAP_KILL")


def test_a_process_without_capabilities_stays_as_it_is(tmp_path: Path) -> None:
    file = tmp_path / "process.json"
    file.write_text('{"args": ["sh"]}')
    capped_runc.edit(["exec", "--process", str(file), "id"], MISSING)
    assert json.loads(file.read_text()) == {"args": ["sh"]}
