"""The environment of a node: that of its pod, with paths and addresses of this machine."""

import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path

from msgspec import Struct

from torchrun_api.contract import launch
from torchrun_api.json import JsonObject

HOST = "127.0.0.1"
# What a surrounding torchrun or job would pass on to the ranks.
_OF_OTHER_RUNS = re.compile(
    r"(PET|TORCHRUN|TORCHELASTIC)_.*|(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|GROUP_WORLD_SIZE"
    r"|LOCAL_WORLD_SIZE|MASTER_(ADDR|PORT)|NNODES|NODE_RANK"
)
_REFERENCE = re.compile(r"\$(\$|\(([-._a-zA-Z0-9]+)\))")


class NodePlaces(Struct, frozen=True, kw_only=True):
    """The paths of one node. `folder` has what a kubelet would mount; the rest is the user's."""

    folder: Path
    directory: Path
    state: Path
    checkpoints: Path

    @property
    def annotations(self) -> Path:
        """The annotations of the pod."""
        return self.folder / "annotations"

    @property
    def termination_log(self) -> Path:
        """Where the launcher writes why its command ended."""
        return self.folder / "termination-log"

    @property
    def token(self) -> Path:
        """The token for progress reports."""
        return self.folder / "token"


def environment_of(
    variables: Sequence[JsonObject],
    index: int,
    places: NodePlaces,
    base: Mapping[str, str],
    devices: Sequence[int] = (),
) -> dict[str, str]:
    """Return the environment of the node's launcher.

    `variables` are the v1 EnvVars of the pod's container. Values from Secrets, ConfigMaps and
    fields other than the index are left out. `devices`: the GPUs of this node; all without any.
    """
    environment = {k: v for k, v in base.items() if not _OF_OTHER_RUNS.fullmatch(k)}
    if devices:
        environment["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, devices))
    of_pod: dict[str, str] = {}
    for variable in variables:
        name, value = str(variable["name"]), variable.get("value")
        if isinstance(value, str):
            of_pod[name] = expand(value, of_pod)
        elif name == launch.NODE_RANK.name:
            of_pod[name] = str(index)
    return {
        **environment,
        **of_pod,
        launch.PET_MASTER_ADDR.name: HOST,
        launch.WORKSPACE_SOURCE.name: str(places.directory),
        launch.WORKSPACE_TARGET.name: str(places.directory),
        launch.WORKING_DIR.name: _directory(of_pod, places.directory),
        launch.START_FILE.name: str(places.annotations),
        launch.TERMINATION_LOG.name: str(places.termination_log),
        launch.PROGRESS_TOKEN_FILE.name: str(places.token),
        launch.STATE_DIR.name: str(places.state),
        launch.CHECKPOINT_DIR.name: str(places.checkpoints),
    }


def missing_values(variables: Sequence[JsonObject]) -> list[str]:
    """Return the names of the variables whose values exist in a cluster only."""
    return [
        str(variable["name"])
        for variable in variables
        if "valueFrom" in variable and "fieldref" not in str(variable["valueFrom"]).lower()
    ]


def write_annotations(path: Path, annotations: Mapping[str, str]) -> None:
    """Replace the file as the kubelet does (downward API), so that no reader sees half of it."""
    fresh = path.with_name(f"{path.name}.new")
    text = "".join(f'{name}="{value}"\n' for name, value in sorted(annotations.items()))
    fresh.write_text(text, encoding="utf-8")
    os.replace(fresh, path)


def _directory(of_pod: Mapping[str, str], directory: Path) -> str:
    """Return the working directory: one below the workspace of the pods is below `directory`."""
    wanted = of_pod.get(launch.WORKING_DIR.name, "")
    workspace = launch.WORKSPACE_TARGET.default
    if wanted in ("", workspace):
        return str(directory)
    if wanted.startswith(f"{workspace}/"):
        return str(directory / wanted.removeprefix(f"{workspace}/"))
    return wanted


def expand(value: str, known: Mapping[str, str]) -> str:
    """Expand `$(NAME)` and `$$` as the kubelet does (third_party/forked/golang/expansion)."""

    def replace(match: re.Match[str]) -> str:
        if match[1] == "$":
            return "$"
        return known.get(match[2], match[0])

    return _REFERENCE.sub(replace, value)
