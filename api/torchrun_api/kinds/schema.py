"""What the CRD schema must contain in addition to the Python types."""

from typing import Annotated, Literal, TypeAlias

from msgspec import Meta, Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds.quantity import MAX_LENGTH, PATTERN


class Rule(Struct, frozen=True):
    """One CEL rule of `x-kubernetes-validations`; a type lists its own in `RULES`.

    Fields that the schema requires, although Python has a default for them, are in `REQUIRED`.
    """

    rule: str
    message: str
    field: str = ""  # the field that the error names, as ".spec.jobQueue"


class RemovedField(Struct, frozen=True):
    """A field that other versions have; a type lists its own in `REMOVED`.

    The API server refuses it with the sentence `instead`. A field that the schema does not know at
    all would be dropped in silence. `type` is the type that the field had, because CEL rules cannot
    read values without one.
    """

    name: str
    type: Literal["string", "integer", "boolean", "object", "objects"]
    instead: str


Quantity: TypeAlias = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "x-kubernetes-int-or-string": True,
            "pattern": PATTERN,
            "maxLength": MAX_LENGTH,
            "minimum": 0,
        }
    ),
]


def one_of(*values: str) -> Meta:
    """An enumeration of a status, which is read as any string: a newer version may have added one.

    Use it at run time only. The type checker gets the Literal.
    """
    return Meta(extra_json_schema={"enum": [*sorted(values)]})


# An object with the fields of a Kubernetes type: the API server keeps unknown fields.
Embedded: TypeAlias = Annotated[
    JsonObject, Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})
]

# Lists of objects that server-side apply merges by name, as the core kinds have them.
BY_NAME: JsonObject = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["name"]}
BY_TYPE: JsonObject = {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": ["type"]}
