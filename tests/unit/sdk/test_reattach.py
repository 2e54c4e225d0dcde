"""Kept results: of the wanted call alone, whatever else is in the state directory."""

from collections.abc import Callable
from pathlib import Path

import pytest

import torchrun_sdk as kt
from torchrun_sdk import kubectl, reattach
from torchrun_sdk.kubectl import Kubectl
from torchrun_sdk.serialization import pack, unpack
from torchrun_sdk.spec import Frame, Result, Started, encode

SUCCEEDED = {"phase": "Succeeded"}


@pytest.fixture
def store(cluster: Path) -> Callable[[str, Frame], None]:
    """Store the frame of a rank that has ended."""

    def store(call: str, left: Frame, world: int = 1) -> None:
        folder = cluster / "state" / "sdk" / call
        folder.mkdir(parents=True, exist_ok=True)
        started = Started(left.rank, world, "a", 1, 1.0)
        (folder / f"{left.rank}.started").write_text(encode(started))
        (folder / f"{left.rank}.left").write_text(encode(left))

    return store


def returned(rank: int, value: object) -> Result:
    return Result(rank, "a", pack(value, "json", "x"))


@pytest.mark.parametrize("name", ["0.left.4711", "0.left.new", "notes.txt", "0.log"])
def test_other_files_hide_no_results(cluster: Path, store: Callable[..., None], name: str) -> None:
    store("c1", returned(0, 41))
    store("c2", returned(0, 42))
    for call in ("c1", "c2"):
        (cluster / "state" / "sdk" / call / name).write_text('{"kind": "Result", "rank": 0, "no')
    (cluster / "state" / "sdk" / "c3").mkdir()
    (cluster / "state" / "sdk" / "c3" / name).write_text("{")
    (result,) = reattach.kept_results("j", Kubectl(), SUCCEEDED)
    assert unpack(result.value) == 42


def test_unreadable_results_of_earlier_calls_do_not_matter(
    cluster: Path, store: Callable[..., None]
) -> None:
    store("c1", returned(0, 41))
    store("c2", returned(0, 42))
    (cluster / "state" / "sdk" / "c1" / "0.left").write_text('{"kind"')
    for call in ("", "c2"):
        (result,) = reattach.kept_results("j", Kubectl(), SUCCEEDED, call)
        assert unpack(result.value) == 42
    with pytest.raises(kt.ProtocolError):
        reattach.kept_results("j", Kubectl(), SUCCEEDED, "c1")


def test_the_limit_of_a_value_is_not_that_of_all_ranks(
    cluster: Path, store: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kubectl, "LONGEST_LINE", 1000)
    monkeypatch.setattr(kubectl, "_LONGEST_OUTPUT", 2000)
    for rank in range(8):
        store("c1", returned(rank, "x" * 600), 8)
    results = reattach.kept_results("j", Kubectl(), SUCCEEDED)
    assert [len(unpack(result.value)) for result in results] == [600] * 8
    store("c1", returned(0, "x" * 1200), 8)
    with pytest.raises(kt.ProtocolError):
        reattach.kept_results("j", Kubectl(), SUCCEEDED)
