"""Errors between the controller and the API server."""

import http
from typing import NamedTuple

import msgspec

_START_LENGTH = 40  # characters of a response that does not decode
_EXCERPT_LENGTH = 200  # characters of a response that is not a Status
# In the API server's message, with status 500, about an object that is too large for etcd: of etcd,
# and of the gRPC client before it.
_TOO_LARGE = ("request is too large", "trying to send message larger than max")
# The same for a webhook with failurePolicy Fail that does not answer.
_WEBHOOK_FAILED = "failed calling webhook"
# Longest Retry-After that is honoured; unparsable values count as this.
LONGEST_WAIT = 600  # seconds


class ConfigError(Exception):
    """The connection's configuration cannot be used; the message says what to change."""


class Disconnected(Exception):  # noqa: N818 named for a state
    """The server was not reached or its response was lost: a write may have happened."""


class Silent(Disconnected):
    """A watch delivered nothing within its silence limit: it is dead, or nothing changed."""


class InvalidResponse(Disconnected):
    """The response does not decode, or comes from a proxy. A write may have happened."""

    @classmethod
    def of(cls, request: str, body: bytes, error: Exception) -> "InvalidResponse":
        """Build the error from the request and the first 40 bytes: too few to leak a token."""
        start = body[:_START_LENGTH].decode(errors="replace")
        return cls(f"{request}: unexpected response, {start!r}... ({error})")


class StatusCause(NamedTuple):
    """One entry of `details.causes` of a Status: the refused field and the reason."""

    field: str
    message: str


class ApiError(Exception):
    """The server answered with an error.

    `status` is the HTTP code; `reason` the CamelCase word of metav1.Status ("Conflict", "Expired");
    `retry_after` the seconds that the server asks to wait, from its body or its Retry-After header,
    at most 600.
    """

    def __init__(
        self,
        status: int,
        reason: str,
        message: str,
        retry_after: float | None = None,
        causes: tuple[StatusCause, ...] = (),
    ) -> None:
        super().__init__(status, reason, message, retry_after, causes)
        self.status = status
        self.reason = reason
        self.message = message
        self.retry_after = retry_after
        self.causes = causes

    def __str__(self) -> str:
        return f"{self.status} {self.reason}: {self.message}"

    @property
    def is_too_large(self) -> bool:
        """Whether the API server or etcd refuses an object for its size."""
        too_large_for_etcd = any(part in self.message for part in _TOO_LARGE)
        return self.status == 413 or (self.status == 500 and too_large_for_etcd)

    @property
    def is_permanent(self) -> bool:
        """Whether only another object can succeed."""
        return self.is_too_large or self.status in (400, 422)

    @property
    def is_failed_webhook(self) -> bool:
        """Whether a webhook with failurePolicy Fail did not answer."""
        return self.status == 500 and _WEBHOOK_FAILED in self.message

    @classmethod
    def from_answer(cls, status: int, body: bytes, retry_after: str = "") -> "ApiError":
        """Read an answer of 300 and above; `retry_after` is the header. Never raises."""
        try:
            answer = _STATUS.decode(body)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
            answer = _Status()
        if answer.kind != "Status":
            # A proxy, a webhook or priority-and-fairness ("Too many requests", plain text).
            answer = _Status(message=_excerpt(body))
        return cls(
            status,
            answer.reason or _http_reason(status),
            answer.message or "no message from the server",
            _parse_retry_after(answer.details.retry_after_seconds, retry_after),
            tuple(StatusCause(cause.field, cause.message) for cause in answer.details.causes or ()),
        )


class _StatusCause(msgspec.Struct, frozen=True):
    field: str = ""
    message: str = ""


class _StatusDetails(msgspec.Struct, frozen=True, rename="camel"):
    causes: tuple[_StatusCause, ...] | None = None
    retry_after_seconds: int = 0


class _Status(msgspec.Struct, frozen=True):
    kind: str = ""
    reason: str = ""
    message: str = ""
    details: _StatusDetails = _StatusDetails()


_STATUS = msgspec.json.Decoder(_Status)


def _http_reason(status: int) -> str:
    try:
        phrase = http.HTTPStatus(status).phrase
    except ValueError:
        return "Unknown"
    return phrase.title().replace(" ", "").replace("-", "")


def _excerpt(body: bytes) -> str:
    text = " ".join(body[: 4 * _EXCERPT_LENGTH].decode(errors="replace").split())
    return text if len(text) <= _EXCERPT_LENGTH else f"{text[:_EXCERPT_LENGTH]}..."


def _parse_retry_after(from_body: int, from_header: str) -> float | None:
    if from_body > 0:
        return float(min(from_body, LONGEST_WAIT))
    # The header may also be a date; the API server sends whole seconds only.
    if not (from_header.isascii() and from_header.isdigit()):
        return None
    return min(float(from_header), float(LONGEST_WAIT))


def explain_refusal(verb: str, resource: str, status: int, message: str) -> str:
    """Explain a refused request and what to do; `status` is the HTTP code, 0 for no answer."""
    match status:
        case 403:
            advice = f"grant the controller's role the verb {verb} on {resource}"
        case 404:
            advice = f"install the CustomResourceDefinition of {resource}"
        case 0:
            advice = "the API server could not be reached"
        case _:
            advice = f"HTTP {status}"
    return f"cannot {verb} {resource}: {advice} ({message})"
