"""The roles of the manifests, as pairs of verb and RBAC resource."""

from pathlib import Path
from typing import Any

import yaml

ROLE = Path(__file__).parents[1] / "manifests" / "rbac" / "role.yaml"


def documents() -> list[dict[str, Any]]:
    return list(yaml.safe_load_all(ROLE.read_text()))


def named(resource: str, group: str) -> str:
    """`podgroups.scheduling.run.ai`, `torchrunjobs.torchrun.ai/status`, `pods`."""
    plural, _, part = resource.partition("/")
    return plural + (f".{group}" if group else "") + (f"/{part}" if part else "")


def granted(*names: str) -> set[tuple[str, str]]:
    """The permissions of the roles with these names; of all roles without names."""
    return {
        (verb, named(resource, group))
        for document in documents()
        if not names or document["metadata"]["name"] in names
        for rule in document.get("rules", ())
        for group in rule["apiGroups"]
        for resource in rule["resources"]
        for verb in rule["verbs"]
    }
