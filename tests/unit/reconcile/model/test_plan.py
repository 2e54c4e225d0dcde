"""Which applies of a Plan are sent at the same time."""

import pytest
from msgspec.structs import replace

from torchrun_api.kinds import SERVICES
from torchrun_controller.reconcile.model.plan import Apply, batches_of


@pytest.mark.parametrize(
    ("names", "batches"),
    [
        ("", ""),
        ("a", "a"),
        ("a b", "a|b"),
        ("a+ b", "ab"),
        ("a b+ c d", "a|bc|d"),
        ("a+ b+ c", "abc"),
        ("a b+", "a|b"),
    ],
)
def test_an_apply_with_next_is_in_the_batch_of_the_next_one(names: str, batches: str) -> None:
    applies = tuple(
        replace(Apply(SERVICES, {"metadata": {"name": name[0]}}), with_next=name.endswith("+"))
        for name in names.split()
    )
    found = ["".join(apply.name for apply in batch) for batch in batches_of(applies)]
    assert "|".join(found) == batches
