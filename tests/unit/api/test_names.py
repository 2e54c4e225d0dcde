"""Numbers in labels, annotations and names: anybody may have written them."""

import pytest

from torchrun_api import names


@pytest.mark.parametrize(
    ("text", "number"),
    [("0", 0), ("17", 17), ("", 0), ("-1", 0), ("1.5", 0), ("\u00b2", 0), ("9" * 5000, 0)],
)
def test_that_a_label_holds_a_number_or_none(text: str, number: int) -> None:
    assert names.number_in(text) == number


def test_that_what_holds_no_number_counts_as_said() -> None:
    assert names.number_in("soon", 3) == 3
    assert names.number_in("5", 3) == 5


@pytest.mark.parametrize(
    ("name", "number"), [("a-sync-12", 12), ("a-sync-0", 0), ("a-sync-x", 0), ("a", 0), ("7", 7)]
)
def test_that_a_pod_ends_with_its_number(name: str, number: int) -> None:
    assert names.number_of(name) == number
