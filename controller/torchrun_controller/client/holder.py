"""The object that has the name of a new one: whose it is."""

from typing import Any

import msgspec

from torchrun_api.json import JsonObject
from torchrun_api.kinds import Kind
from torchrun_api.meta import OwnerReference, find_controller
from torchrun_api.names import RETAINED_LABEL
from torchrun_controller.client.responses import HolderMeta
from torchrun_controller.reconcile.model.observed import Conflict


def read_controller(references: object) -> OwnerReference | None:
    """Return the controller among the ownerReferences of a body; None without one."""
    return find_controller(msgspec.convert(references or (), tuple[OwnerReference, ...]))


def is_ours(holder: HolderMeta, owner: OwnerReference | None, meta: JsonObject) -> bool:
    """Whether the object belongs to this owner, or is retained from a job of the same name.

    `meta` is the metadata of the object to create.
    """
    if owner is not None:
        controller = find_controller(holder.owner_references)
        return controller is not None and controller.uid == owner.uid
    labels = meta.get("labels")
    retained_from = labels.get(RETAINED_LABEL) if isinstance(labels, dict) else None
    return retained_from is not None and holder.labels.get(RETAINED_LABEL) == retained_from


def is_predecessor(holder: HolderMeta, owner: OwnerReference | None) -> bool:
    """Whether the controller is a deleted job of the same name, so garbage collection is due."""
    controller = find_controller(holder.owner_references)
    return (
        owner is not None
        and controller is not None
        and (controller.kind, controller.name) == (owner.kind, owner.name)
        and controller.api_version.partition("/")[0] == owner.api_version.partition("/")[0]
        and controller.uid != owner.uid
    )


def describe_conflict(kind: Kind[Any], name: str, holder: HolderMeta) -> Conflict:
    """Return the conflict, with whose object it is and what the user can do."""
    controller = find_controller(holder.owner_references)
    if controller is not None:
        ownership = f"belongs to {controller.kind} {controller.name!r}"
    else:
        ownership = f"was created by {', '.join(holder.managers) or 'another client'}"
    return Conflict(
        resource=kind.resource,
        name=name,
        message=f"{kind.kind} {name!r} already exists and {ownership}. "
        "Delete it or choose another name.",
    )
