"""KAI's queues: few, so their contents are kept whole, and drift is found by comparing them."""

from msgspec import field

from torchrun_api.json import JsonObject
from torchrun_api.kinds.meta import ObjectMeta, Wire


class KaiQueue(Wire, frozen=True, kw_only=True):
    """A scheduling.run.ai/v2 Queue; it has no namespace."""

    metadata: ObjectMeta = ObjectMeta()
    spec: JsonObject = field(default_factory=dict)
