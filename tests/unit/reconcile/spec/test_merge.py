"""Strategic merge: lists with a merge key are merged by item, others are replaced."""

from hypothesis import given
from hypothesis import strategies as st

from torchrun_controller.reconcile.spec.merge import merge

NAMES = st.sampled_from(["a", "b", "c"])
CONTAINERS = st.lists(
    st.fixed_dictionaries({"name": NAMES, "image": st.text(max_size=3)}),
    unique_by=lambda c: c["name"],
)


def test_containers_are_merged_by_name():
    base = {"containers": [{"name": "trainer", "image": "a", "tty": True}, {"name": "x"}]}
    over = {"containers": [{"name": "trainer", "image": "b"}, {"name": "y"}]}
    assert merge(base, over) == {
        "containers": [{"name": "trainer", "image": "b", "tty": True}, {"name": "x"}, {"name": "y"}]
    }


def test_lists_without_a_key_are_replaced():
    assert merge({"args": [1, 2], "tolerations": [{"key": "a"}]}, {"args": [3]}) == {
        "args": [3],
        "tolerations": [{"key": "a"}],
    }


def test_null_removes_and_types_may_change():
    assert merge({"a": 1, "b": {"c": 1}}, {"a": None, "b": 2}) == {"b": 2}


def test_items_that_are_no_objects_stay():
    assert merge({"env": ["odd"]}, {"env": ["odder"]}) == {"env": ["odd", "odder"]}


def test_items_whose_key_is_no_text_and_no_number_stay():
    odd = {"name": [{}], "image": "a"}
    assert merge({"env": [odd]}, {"env": [{"name": "b"}, odd]}) == {
        "env": [odd, {"name": "b"}, odd]
    }
    assert merge({"env": [{"name": None}]}, {"env": [{}]}) == {"env": [{"name": None}, {}]}


@given(CONTAINERS, CONTAINERS)
def test_no_name_is_lost_or_doubled_and_the_upper_layer_wins(base, over):
    before = ({"containers": list(base)}, {"containers": list(over)})
    merged = merge({"containers": base}, {"containers": over})["containers"]
    names_of_containers = [c["name"] for c in merged]
    assert len(names_of_containers) == len(set(names_of_containers))
    assert set(names_of_containers) == {c["name"] for c in base + over}
    images = {c["name"]: c["image"] for c in merged}
    assert all(images[c["name"]] == c["image"] for c in over)
    assert before == ({"containers": base}, {"containers": over})
