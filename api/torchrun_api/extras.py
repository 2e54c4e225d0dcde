"""The objects of a queue: its ConfigMaps and PVCs, and KAI's queues.

They are few, so their contents are kept whole. Drift is found by comparing them.
"""

from msgspec import field

from torchrun_api.json import JsonObject
from torchrun_api.meta import ObjectMeta, Wire


class ConfigMap(Wire, frozen=True, kw_only=True):
    """A v1 ConfigMap."""

    metadata: ObjectMeta = ObjectMeta()
    data: dict[str, str] = field(default_factory=dict)
    binary_data: dict[str, str] = field(default_factory=dict)

    @property
    def content(self) -> JsonObject:
        """The fields that a template may set, as in a manifest."""
        return {"data": {**self.data}, "binaryData": {**self.binary_data}}


class QueueClaim(Wire, frozen=True, kw_only=True):
    """A v1 PersistentVolumeClaim of a queue."""

    metadata: ObjectMeta = ObjectMeta()
    spec: JsonObject = field(default_factory=dict)

    @property
    def content(self) -> JsonObject:
        """The fields that a template may set, as in a manifest."""
        return {"spec": self.spec}


class KaiQueue(Wire, frozen=True, kw_only=True):
    """A scheduling.run.ai/v2 Queue; it has no namespace."""

    metadata: ObjectMeta = ObjectMeta()
    spec: JsonObject = field(default_factory=dict)
