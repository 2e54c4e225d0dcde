"""The result of the last list or watch of an informer."""

from torchrun_controller.client.errors import explain_refusal


class LastRead:
    """The HTTP code of the last list or watch of `resource`, 0 without a response."""

    def __init__(self, resource: str) -> None:
        self._resource = resource
        self._verb, self._code = "list", 200

    def record(self, verb: str, code: int) -> None:
        """Record a request. A streamed list is a watch, and needs the verb watch only."""
        self._verb, self._code = verb, code

    @property
    def problem(self) -> str:
        """Why the request failed, and what to do; "" if it succeeded."""
        if 200 <= self._code < 300:
            return ""
        return explain_refusal(self._verb, self._resource, self._code, f"HTTP {self._code}")

    @property
    def refused(self) -> bool:
        """Whether the resource is forbidden or not served (403, 404)."""
        return self._code in (403, 404)
