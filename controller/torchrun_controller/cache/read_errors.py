"""The errors of lists and watches, for readiness and for optional views."""

from collections.abc import Callable

from torchrun_controller.client.errors import explain_refusal


class ReadErrors:
    """The HTTP code of the last list or watch of each resource, 0 without a response."""

    def __init__(
        self, observe: Callable[[str, str, int, float], None] = lambda *request: None
    ) -> None:
        self._observe = observe
        self._last: dict[str, tuple[str, int]] = {}

    def observe(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Record a request; a transport's `Observe`. Calls `observe` with the same arguments."""
        # A streamed list is a watch, and needs the verb watch only.
        self._last[resource] = ("watch" if verb == "watch" else "list", code)
        self._observe(verb, resource, code, seconds)

    def problem(self, resource: str) -> str:
        """Return why the last list or watch failed, and what to do; "" if it succeeded."""
        verb, code = self._last.get(resource, ("list", 200))
        return "" if 200 <= code < 300 else explain_refusal(verb, resource, code, f"HTTP {code}")

    def refused(self, resource: str) -> bool:
        """Return whether the resource is forbidden or not served (403, 404)."""
        return self._last.get(resource, ("list", 200))[1] in (403, 404)
