"""The environment of a node of a run on this machine."""

from pathlib import Path

import pytest

from kubectl_torchrun.local.environment import (
    NodePlaces,
    environment_of,
    missing_values,
    write_annotations,
)
from torchrun_api.json import JsonObject

MASTER = "train-0.train.ml"
OF_GANG: list[JsonObject] = [
    {"name": "PET_MASTER_ADDR", "value": MASTER},
    {"name": "NODE_RANK", "valueFrom": {"fieldRef": {"fieldPath": "metadata.annotations['i']"}}},
]


def variables(*own: JsonObject, index: int = 0, **base: str) -> dict[str, str]:
    places = NodePlaces(
        folder=Path("/run/node"),
        directory=Path("/home/me/code"),
        state=Path("/home/me/code/.torchrun/runs/t"),
        checkpoints=Path("/home/me/code/.torchrun/checkpoints/t"),
    )
    return environment_of([*own, *OF_GANG], index, places, base)


def test_the_addresses_of_the_gang_are_those_of_this_machine() -> None:
    environment = variables(index=3)
    assert environment["PET_MASTER_ADDR"] == "127.0.0.1"
    assert environment["NODE_RANK"] == "3"


def test_an_endpoint_of_the_user_stays() -> None:
    etcd: JsonObject = {"name": "PET_RDZV_ENDPOINT", "value": "etcd.example:2379"}
    places = NodePlaces(
        folder=Path("/n"), directory=Path("/d"), state=Path("/s"), checkpoints=Path("/c")
    )
    assert environment_of([OF_GANG[0], etcd], 0, places, {})["PET_RDZV_ENDPOINT"] == etcd["value"]


@pytest.mark.parametrize(
    ("written", "directory"),
    [
        ("/app", "/home/me/code"),
        ("/app/src", "/home/me/code/src"),
        ("/opt/data", "/opt/data"),
        (None, "/home/me/code"),
    ],
)
def test_a_directory_below_the_workspace_is_below_the_directory_of_the_run(
    written: str | None, directory: str
) -> None:
    own: list[JsonObject] = [{"name": "TORCHRUN_WORKING_DIR", "value": written}] if written else []
    assert variables(*own)["TORCHRUN_WORKING_DIR"] == directory


@pytest.mark.parametrize(
    ("written", "value"),
    [
        ("$(WHO) $$(WHO) $$$$", "me $(WHO) $$"),
        ("$(UNKNOWN) $WHO $(not a name)", "$(UNKNOWN) $WHO $(not a name)"),
    ],
)
def test_references_are_expanded_as_the_kubelet_does(written: str, value: str) -> None:
    who: JsonObject = {"name": "WHO", "value": "me"}
    assert variables(who, {"name": "TEXT", "value": written})["TEXT"] == value


def test_ranks_see_nothing_of_a_surrounding_torchrun() -> None:
    environment = variables(
        RANK="5", LOCAL_WORLD_SIZE="8", TORCHELASTIC_RUN_ID="x", HOME="/home/me"
    )
    assert environment["HOME"] == "/home/me"
    assert not {"RANK", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RUN_ID"} & environment.keys()


def test_values_of_a_cluster_are_named() -> None:
    secret: JsonObject = {"name": "KEY", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}}
    assert missing_values([secret, *OF_GANG]) == ["KEY"]


def test_annotations_are_in_the_format_of_the_kubelet(tmp_path: Path) -> None:
    write_annotations(tmp_path / "annotations", {"b": "2", "a": "1"})
    assert (tmp_path / "annotations").read_text() == 'a="1"\nb="2"\n'
    assert [path.name for path in tmp_path.iterdir()] == ["annotations"]
