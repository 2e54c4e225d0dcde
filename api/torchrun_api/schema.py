"""The vocabulary in which types say what the CRD schema shall hold beyond their Python shape."""

from typing import Annotated, TypeAlias

from msgspec import Meta, Struct

from torchrun_api.json import JsonObject


class Rule(Struct, frozen=True):
    """One CEL rule of `x-kubernetes-validations`; a type lists its own in `RULES`."""

    rule: str
    message: str


Quantity: TypeAlias = Annotated[
    int | str,
    Meta(
        extra_json_schema={
            "x-kubernetes-int-or-string": True,
            "pattern": r"^(\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))(([KMGTPE]i)|[numkMGTPE]|([eE](\+|-)?(([0-9]+(\.[0-9]*)?)|(\.[0-9]+))))?$",
        }
    ),
]

# An object whose fields are Kubernetes' own: the API server keeps what it does not know.
Embedded: TypeAlias = Annotated[
    JsonObject, Meta(extra_json_schema={"x-kubernetes-preserve-unknown-fields": True})
]
