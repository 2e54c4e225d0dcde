"""Where things live: the cache, the state of clusters, and this package's own data files."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

SOURCE = Path(__file__).resolve().parent.parent
"""The folder `cluster/` of the checkout: go.mod files and Dockerfiles stand beside the package."""


def cache_home(environment: Mapping[str, str] = os.environ) -> Path:
    """Downloads and builds that any cluster may reuse; safe to delete while no cluster runs."""
    if own := environment.get("TORCHRUN_CACHE"):
        return Path(own).absolute()
    base = environment.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(base).absolute() / "torchrun-controller"


def state_home(environment: Mapping[str, str] = os.environ) -> Path:
    """One folder a cluster; `down` deletes it."""
    if own := environment.get("TORCHRUN_STATE"):
        return Path(own).absolute()
    return cache_home(environment) / "clusters"
