"""Why lists and watches fail, for readiness and for views that can do without."""

from collections.abc import Callable

from torchrun_controller.client.errors import explain_refusal


class ReadErrors:
    """The last answers to lists and watches: HTTP codes by resource, 0 for no answer."""

    def __init__(
        self, observe: Callable[[str, str, int, float], None] = lambda *request: None
    ) -> None:
        self._observe = observe
        self._last: dict[str, tuple[str, int]] = {}

    def observe(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Note a request of the transport. Calls `observe` with the same arguments."""
        # A streamed list is a watch, and needs the verb watch only.
        self._last[resource] = ("watch" if verb == "watch" else "list", code)
        self._observe(verb, resource, code, seconds)

    def problem(self, resource: str) -> str:
        """Return why the last list or watch failed, "" if it did not."""
        verb, code = self._last.get(resource, ("list", 200))
        return "" if 200 <= code < 300 else explain_refusal(verb, resource, code, f"HTTP {code}")

    def refused(self, resource: str) -> bool:
        """Return whether the resource is forbidden or not served (403, 404)."""
        return self._last.get(resource, ("list", 200))[1] in (403, 404)
