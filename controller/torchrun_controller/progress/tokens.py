"""Whose token it is: the API server's word, asked for seldom and kept for a minute.

https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/ (bound tokens): the
claims of a projected token name the pod that it is bound to, and so does a TokenReview's answer.
The claims alone prove nothing, but a token whose claims name no worker of ours needs no review, so
that strangers cannot make the controller ask.
"""

import base64
import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Final

import msgspec
from msgspec import Struct, field

from torchrun_api.meta import Wire
from torchrun_controller.reconcile.progress import AUDIENCE
from torchrun_controller.transport import ApiError, Disconnected, Transport

PATH: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
KEPT_SECONDS = 60.0
REFUSALS_KEPT_SECONDS = 10.0  # a pod that the API server does not know yet will soon be known
KEPT_VERDICTS = 10_000
REVIEWS_PER_SECOND = 20.0
BURST = 200.0
REVIEW_TIMEOUT = 5.0
LONGEST = 8192  # bytes of a token
_USER_PREFIX = "system:serviceaccount:"


class BusyError(Exception):
    """The token could not be reviewed now; the message says why."""


class PodIdentity(Struct, frozen=True):
    """The pod that a token is bound to."""

    namespace: str
    name: str
    uid: str


class _PodClaim(Struct, frozen=True):
    name: str = ""
    uid: str = ""


class _KubernetesClaim(Struct, frozen=True):
    namespace: str = ""
    pod: _PodClaim = _PodClaim()


class Claims(Struct, frozen=True):
    """What a token says of itself; proves nothing."""

    aud: tuple[str, ...] = ()
    exp: float = 0.0
    kubernetes: _KubernetesClaim = field(default=_KubernetesClaim(), name="kubernetes.io")

    @property
    def pod(self) -> PodIdentity:
        """The pod that it claims to be bound to."""
        claimed = self.kubernetes
        return PodIdentity(claimed.namespace, claimed.pod.name, claimed.pod.uid)


class _User(Wire, frozen=True, kw_only=True):
    username: str = ""
    extra: dict[str, tuple[str, ...]] = field(default_factory=dict)


class _ReviewStatus(Wire, frozen=True, kw_only=True):
    authenticated: bool = False
    audiences: tuple[str, ...] = ()
    user: _User = _User()


class _Review(Wire, frozen=True, kw_only=True):
    status: _ReviewStatus = _ReviewStatus()


def claims_of(token: str, now: float) -> Claims | None:
    """The claims of a token for this audience that has not expired; `now` since the epoch."""
    try:
        _, payload, _ = token.split(".")
        padded = payload + "=" * (-len(payload) % 4)
        claims = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=Claims)
    except (ValueError, RecursionError):  # it is read before anybody has vouched for it
        return None
    return claims if AUDIENCE in claims.aud and claims.exp > now else None


class Tokens:
    """Verdicts on tokens. Bounded: so many are kept, and so many are asked for in a second."""

    def __init__(
        self,
        transport: Transport,
        *,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], float] = time.time,
    ) -> None:
        self._transport = transport
        self._clock = clock
        self._now = now
        # By digest: the pod or None, and until when that may be believed.
        self._verdicts: OrderedDict[bytes, tuple[PodIdentity | None, float]] = OrderedDict()
        self._allowance = BURST
        self._filled = clock()

    def claims(self, token: str) -> Claims | None:
        """See `claims_of`."""
        return claims_of(token, self._now()) if len(token) <= LONGEST else None

    async def pod_of(self, token: str, claims: Claims) -> PodIdentity | None:
        """The pod that the token proves to be; None if it proves nothing. Raises BusyError."""
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verdicts.get(digest)
        if known is not None and self._clock() < known[1]:
            return known[0]
        self._take_one()
        pod = await self._review(token)
        kept = min(KEPT_SECONDS, claims.exp - self._now()) if pod else REFUSALS_KEPT_SECONDS
        self._verdicts[digest] = pod, self._clock() + kept
        self._verdicts.move_to_end(digest)
        while len(self._verdicts) > KEPT_VERDICTS:
            self._verdicts.popitem(last=False)
        return pod

    def _take_one(self) -> None:
        now = self._clock()
        refill = (now - self._filled) * REVIEWS_PER_SECOND
        self._allowance, self._filled = min(BURST, self._allowance + refill), now
        if self._allowance < 1:
            raise BusyError("too many tokens to review")
        self._allowance -= 1

    async def _review(self, token: str) -> PodIdentity | None:
        body = {
            "apiVersion": "authentication.k8s.io/v1",
            "kind": "TokenReview",
            "spec": {"token": token, "audiences": [AUDIENCE]},
        }
        try:
            answer = await self._transport.request(
                "POST", PATH, body=msgspec.json.encode(body), timeout=REVIEW_TIMEOUT
            )
            status = msgspec.json.decode(answer.body, type=_Review).status
        except (ApiError, Disconnected, msgspec.DecodeError) as error:
            raise BusyError(f"the token cannot be reviewed: {error}") from error
        # A server that knows no audiences leaves them out: its word is for its own audience.
        if not status.authenticated or AUDIENCE not in status.audiences:
            return None
        namespace, _, account = status.user.username.removeprefix(_USER_PREFIX).partition(":")
        if not account or not status.user.username.startswith(_USER_PREFIX):
            return None
        name, uid = (
            next(iter(status.user.extra.get(f"authentication.kubernetes.io/{part}", ())), "")
            for part in ("pod-name", "pod-uid")
        )
        return PodIdentity(namespace, name, uid) if name and uid else None
