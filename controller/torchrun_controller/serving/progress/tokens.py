"""Verification of tokens by the API server, limited in rate and cached for a minute.

https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/ (bound tokens): the
claims of a projected token name the pod that it is bound to, and so does a TokenReview's answer.
The claims alone prove nothing, but a token whose claims name no living worker of ours needs no
review, so that strangers cannot make the controller ask.

Anybody can invent claims that name a worker, so reviews are limited at the forger's expense:

- Tokens that were verified before have a bucket of their own, which unverified tokens cannot empty.
  One such token is remembered for each pod.
- Any other token takes from three buckets: that of the sender's address and the claimed pod, that
  of the pod's namespace, and that of all. A namespace has a quarter of the whole, and only its own
  users know the UIDs of its pods.
"""

import base64
import hashlib
import re
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Final, TypeVar

import msgspec
from msgspec import Struct, field

from torchrun_api.meta import Wire
from torchrun_controller.client import ApiError, Disconnected, Transport
from torchrun_controller.rate_limit import Rate, TokenBuckets
from torchrun_controller.reconcile.objects.progress_reports import AUDIENCE

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

PATH: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
KEPT_SECONDS = 60.0
REFUSALS_KEPT_SECONDS = 10.0  # a new pod may be unknown to the API server for a moment
MAX_CACHED = 10_000
OF_ALL = Rate(per_second=20, burst=200)
OF_NAMESPACE = Rate(per_second=5, burst=50)
OF_POD = Rate(per_second=0.1, burst=3)  # a new token comes every few minutes at most
REVIEW_TIMEOUT = 5.0
LONGEST = 8192  # bytes of a token
_JWT = re.compile(r"[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+")  # RFC 7515, compact
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
    """The claims of a token. They prove nothing."""

    aud: tuple[str, ...] = ()
    exp: float = 0.0
    kubernetes: _KubernetesClaim = field(default=_KubernetesClaim(), name="kubernetes.io")

    @property
    def pod(self) -> PodIdentity:
        """The pod that the token claims to be bound to."""
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
    status: _ReviewStatus


_decode_review = msgspec.json.Decoder(_Review).decode


def claims_of(token: str, now: float) -> Claims | None:
    """The claims of an unexpired token for this audience; `now` in seconds since the epoch."""
    if _JWT.fullmatch(token) is None:
        return None
    try:
        payload = token.split(".")[1]
        padded = payload + "=" * (-len(payload) % 4)
        claims = msgspec.json.decode(base64.urlsafe_b64decode(padded), type=Claims)
    except (ValueError, RecursionError):  # the token is not verified yet
        return None
    return claims if AUDIENCE in claims.aud and claims.exp > now else None


class _Verified(Struct, frozen=True):
    """The token that a pod last proved its identity with; valid `until`, then reviewed again."""

    digest: bytes
    pod: PodIdentity
    until: float


class Tokens:
    """Verifies tokens by TokenReviews. Bounded in memory and in reviews for each second."""

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
        # By the pod that the token names.
        self._verified: OrderedDict[PodIdentity, _Verified] = OrderedDict()
        # By digest: the time until which a refusal is cached.
        self._refused: OrderedDict[bytes, float] = OrderedDict()
        self._again: TokenBuckets[None] = TokenBuckets(OF_ALL, clock)
        self._all: TokenBuckets[None] = TokenBuckets(OF_ALL, clock)
        self._namespaces: TokenBuckets[str] = TokenBuckets(OF_NAMESPACE, clock)
        self._pods: TokenBuckets[tuple[str, PodIdentity]] = TokenBuckets(OF_POD, clock)

    def claims(self, token: str) -> Claims | None:
        """See `claims_of`."""
        return claims_of(token, self._now()) if len(token) <= LONGEST else None

    async def pod_of(self, token: str, claims: Claims, source: str) -> PodIdentity | None:
        """Return the pod that the token proves; None if it proves nothing. Raises BusyError.

        `source` is the address of the sender.
        """
        digest = hashlib.sha256(token.encode()).digest()
        known = self._verified.get(claims.pod)
        was_verified = known is not None and known.digest == digest
        if known is not None and was_verified and self._clock() < known.until:
            return known.pod
        if self._clock() < self._refused.get(digest, 0.0):
            return None
        self._take_one(claims.pod, source, was_verified=was_verified)
        pod = await self._review(token)
        if pod is not None:
            kept = min(KEPT_SECONDS, claims.exp - self._now())
            self._verified[claims.pod] = _Verified(digest, pod, self._clock() + kept)
            _bound(self._verified, claims.pod)
        else:
            if was_verified:
                self._verified.pop(claims.pod, None)
            self._refused[digest] = self._clock() + REFUSALS_KEPT_SECONDS
            _bound(self._refused, digest)
        return pod

    def _take_one(self, claimed: PodIdentity, source: str, *, was_verified: bool) -> None:
        """Take one review from each bucket that limits it. Raises BusyError."""
        if was_verified:
            if not self._again.take(None):
                raise BusyError("too many tokens to review again")
            return
        if not self._pods.has_token((source, claimed)):
            raise BusyError(f"too many tokens that name pod {claimed.name}")
        if not self._namespaces.has_token(claimed.namespace):
            raise BusyError(f"too many tokens that name pods of namespace {claimed.namespace}")
        if not self._all.take(None):
            raise BusyError("too many tokens to review")
        self._pods.take((source, claimed))
        self._namespaces.take(claimed.namespace)

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
            status = answer.read(_decode_review).status
        except (ApiError, Disconnected) as error:
            raise BusyError(f"the token cannot be reviewed: {error}") from error
        # A server without audiences omits them: it has checked its own audience only.
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


def _bound(kept: OrderedDict[K, V], newest: K) -> None:
    """Drop the oldest entries above the limit."""
    kept.move_to_end(newest)
    while len(kept) > MAX_CACHED:
        kept.popitem(last=False)
