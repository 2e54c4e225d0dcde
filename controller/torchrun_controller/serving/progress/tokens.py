"""Verification of tokens by the API server, limited in rate and cached for a minute.

https://kubernetes.io/docs/reference/access-authn-authz/service-accounts-admin/ (bound tokens): the
claims of a projected token name the pod that it is bound to, and so does the status of a
TokenReview. The claims alone prove nothing. But a token whose claims name no running worker is
refused without a review, so that unknown senders cause no requests.

Anyone can forge claims that name a worker, so reviews are limited:

- Tokens that were verified before have a bucket of their own, which forged tokens cannot empty. One
  verified token is stored for each pod.
- Each other token takes from three buckets: one for the sender's address and the claimed pod, one
  for the pod's namespace, and one for all. A namespace has a quarter of the overall rate, and only
  its own users know the UIDs of its pods. The workers of four namespaces can use up all reviews:
  who owns a namespace is not known, and a Service may hide the sender's address, so that neither
  can be limited.
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

from torchrun_api.kinds.meta import Wire
from torchrun_controller.client import ApiError, Disconnected, Transport
from torchrun_controller.rate_limit import Rate, TokenBuckets
from torchrun_controller.reconcile.objects.child_job import AUDIENCE

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")

PATH: Final = "/apis/authentication.k8s.io/v1/tokenreviews"
CACHE_SECONDS = 60.0
REFUSAL_CACHE_SECONDS = 10.0  # a new pod may be unknown to the API server for a moment
MAX_CACHED = 10_000
OVERALL_RATE = Rate(per_second=20, burst=200)
NAMESPACE_RATE = Rate(per_second=5, burst=50)
POD_RATE = Rate(per_second=0.1, burst=3)  # a new token comes every few minutes at most
REVIEW_TIMEOUT = 5.0
MAX_TOKEN = 8192  # bytes of a token
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
    """The unverified claims of a token."""

    aud: tuple[str, ...] = ()
    exp: float = 0.0
    kubernetes: _KubernetesClaim = field(default=_KubernetesClaim(), name="kubernetes.io")

    @property
    def pod(self) -> PodIdentity:
        """The pod that the token claims to be bound to."""
        claim = self.kubernetes
        return PodIdentity(claim.namespace, claim.pod.name, claim.pod.uid)


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
    """Decode the claims of a token, without verification.

    Returns None if the token is malformed, expired at `now` (seconds since the epoch) or for
    another audience.
    """
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
    """The last verified token of a pod: its SHA-256, and the time of the next review."""

    digest: bytes
    pod: PodIdentity
    until: float


class Tokens:
    """Verifies tokens by TokenReviews. Bounded in memory and in reviews per second.

    `clock` is monotonic, `now` is Unix time, both in seconds.
    """

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
        self._renewals: TokenBuckets[None] = TokenBuckets(OVERALL_RATE, clock)
        self._overall: TokenBuckets[None] = TokenBuckets(OVERALL_RATE, clock)
        self._namespaces: TokenBuckets[str] = TokenBuckets(NAMESPACE_RATE, clock)
        self._pods: TokenBuckets[tuple[str, PodIdentity]] = TokenBuckets(POD_RATE, clock)

    def claims(self, token: str) -> Claims | None:
        """See `claims_of`."""
        return claims_of(token, self._now()) if len(token) <= MAX_TOKEN else None

    async def pod_of(self, token: str, claims: Claims, source: str) -> PodIdentity | None:
        """Return the pod that the token is bound to; None if the API server refuses the token.

        `claims` are those of the token, `source` is the address of the sender. Raises BusyError if
        the token cannot be reviewed now.
        """
        digest = hashlib.sha256(token.encode()).digest()
        verified = self._verified.get(claims.pod)
        was_verified = verified is not None and verified.digest == digest
        if verified is not None and was_verified and self._clock() < verified.until:
            return verified.pod
        if self._clock() < self._refused.get(digest, 0.0):
            return None
        self._reserve_review(claims.pod, source, was_verified=was_verified)
        pod = await self._review(token)
        if pod is not None:
            lifetime = min(CACHE_SECONDS, claims.exp - self._now())
            self._verified[claims.pod] = _Verified(digest, pod, self._clock() + lifetime)
            _evict_oldest(self._verified, claims.pod)
        else:
            if was_verified:
                self._verified.pop(claims.pod, None)
            self._refused[digest] = self._clock() + REFUSAL_CACHE_SECONDS
            _evict_oldest(self._refused, digest)
        return pod

    def _reserve_review(self, pod_claim: PodIdentity, source: str, *, was_verified: bool) -> None:
        """Take a token from each bucket that limits the review. Raises BusyError."""
        if was_verified:
            if not self._renewals.take(None):
                raise BusyError("too many tokens to review again")
            return
        if not self._pods.has_token((source, pod_claim)):
            raise BusyError(f"too many tokens that name pod {pod_claim.name}")
        if not self._namespaces.has_token(pod_claim.namespace):
            raise BusyError(f"too many tokens that name pods of namespace {pod_claim.namespace}")
        if not self._overall.take(None):
            raise BusyError("too many tokens to review")
        self._pods.take((source, pod_claim))
        self._namespaces.take(pod_claim.namespace)

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
        # A server without support of audiences omits them; it has checked its own audience only.
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


def _evict_oldest(entries: OrderedDict[K, V], newest: K) -> None:
    """Mark `newest` as used, and drop the least recently used entries above MAX_CACHED."""
    entries.move_to_end(newest)
    while len(entries) > MAX_CACHED:
        entries.popitem(last=False)
