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
