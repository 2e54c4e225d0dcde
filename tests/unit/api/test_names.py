"""Numbers in labels, annotations and names, which anyone can write."""

import pytest

from torchrun_api import names


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("17", 17), ("", 0), ("-1", 0), ("1.5", 0), ("\u00b2", 0), ("9" * 5000, 0)],
)
def test_a_label_is_a_number_or_none(text: str, number: int) -> None:
    assert names.number_in(text) == number


def test_an_invalid_number_is_the_default() -> None:
    assert names.number_in("soon", 3) == 3
    assert names.number_in("5", 3) == 5


@pytest.mark.parametrize(
    ("name", "number"), [("a-sync-12", 12), ("a-sync-0", 0), ("a-sync-x", 0), ("a", 0), ("7", 7)]
)
def test_the_index_is_at_the_end_of_the_pod_name(name: str, number: int) -> None:
    assert names.number_of(name) == number


@pytest.mark.parametrize(
    ("name", "is_worker"),
    [
        ("train-0-bcdfg", True),
        ("train-12-x7k2p", True),
        ("train-r3-0-zz999", True),
        ("train-w-1-bcdfg", True),
        ("train-r3-w-1-bcdfg", True),
        ("train-0-debug", False),
        ("train-0-bcdf", False),
        ("train-0-bcdfg2", False),
        ("train-0-bcdf0", False),
        ("train-0-bcdfy", False),
        ("train-0-bcdfg\n", False),
        ("train-bcdfg", False),
        ("train-debug-0-bcdfg", False),
        ("retrain-0-bcdfg", False),
    ],
)
def test_a_worker_has_a_name_that_an_indexed_job_gives(name: str, is_worker: bool) -> None:
    assert names.is_worker("train", name) is is_worker


@pytest.mark.parametrize("attempt", [0, 1, 12])
def test_the_jobs_of_all_gangs_have_names_of_their_own(attempt: int) -> None:
    for name in (names.child_job("train", attempt), names.workers_job("train", attempt)):
        assert names.is_child_job("train", name)
        assert not names.is_child_job("other", name)
        assert not names.is_child_job("train", f"{name}-debug")
        assert not names.is_child_job("train", f"re{name}")
