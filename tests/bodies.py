"""The type of a Kubernetes object as JSON, for tests that read it by subscripts."""

from typing import Any, TypeAlias

# torchrun_api.json.JsonObject is for objects that are written: each level of it must be narrowed to
# be read.
Body: TypeAlias = dict[str, Any]
