"""Parts of the messages that users read."""

import pytest

from torchrun_controller.reconcile.model.messages import count_of, list_names, sentence


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 CPUs"), (1, "1 CPU"), (2, "2 CPUs"), ("1", "1 CPU"), ("500m", "500m CPUs")],
)
def test_the_noun_follows_the_number(number: int | str, text: str) -> None:
    assert count_of(number, "CPU") == text


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("no room", "no room."),
        (" no room. ", "no room."),
        ("no room: \n2 lack cpu\n", "no room: 2 lack cpu."),
    ],
)
def test_a_message_is_one_line_with_a_full_stop(text: str, message: str) -> None:
    assert sentence(text) == message


def test_names_are_ordered_and_the_rest_is_counted() -> None:
    assert list_names("ba") == "a, b"
    assert list_names("dcba") == "a, b, c, d"
    assert list_names("edcba") == "a, b, c, d and 1 more"
    assert list_names("cba", 1, " ") == "a and 2 more"
    assert list_names("dcba", 3, ",") == "a,b,c and 1 more"
    assert list_names("") == ""
