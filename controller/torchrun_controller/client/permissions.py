"""What the controller must be allowed to do, and whether it is: asked, not found out by failing.

`RIGHTS` is the content of manifests/rbac/role.yaml, held equal by a test. The API server is asked
by SelfSubjectAccessReviews, which everybody may make: after the start, every few minutes, and when
a request was refused.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from typing import Protocol, TypeAlias

import anyio
import msgspec
import structlog
from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds import (
    CLAIMS,
    CONFIG_MAPS,
    COSCHEDULING_POD_GROUPS,
    EVENTS,
    JOBS,
    KAI_POD_GROUPS,
    KAI_QUEUES,
    KAI_TOPOLOGIES,
    KUEUE_WORKLOADS,
    NATIVE_GROUPS,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SERVICES,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
    VOLCANO_POD_GROUPS,
)
from torchrun_api.meta import Wire
from torchrun_controller.client import ApiError, Disconnected, Response

SECONDS = 10.0  # between two looks at the rights that are missing, and after a refusal
LOOKS = 30  # until all are looked at again
# Nobody waits for the first look, and jobs may wait for all else that the start does.
START_SECONDS = 2.0

_MADE = ("get", "list", "watch", "create", "patch", "delete")
_PATH = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Right(Struct, frozen=True):
    """Verbs on a resource as RBAC names it: `jobs.batch`, `torchrunjobs.torchrun.ai/status`.

    `without` says what the controller does without it, "" if it cannot work. Rights on what belongs
    to no namespace are the cluster's; those of an `addon` matter where its kinds are served.
    """

    resource: str
    verbs: tuple[str, ...]
    without: str = ""
    cluster: bool = False
    addon: bool = False

    @property
    def group(self) -> str:
        """API group, "" for core."""
        return self.resource.partition("/")[0].partition(".")[2]


_QUEUES_OBJECTS = "objects of spec.resources of queues are not kept"
_GANGS = "gangs are not handed to this scheduler"

RIGHTS = (
    Right(TORCHRUN_JOBS.resource, ("get", "list", "watch", "delete")),
    Right(TORCHRUN_QUEUES.resource, ("list", "watch", "patch")),
    Right(f"{TORCHRUN_JOBS.resource}/status", ("patch",)),
    Right(f"{TORCHRUN_QUEUES.resource}/status", ("patch",)),
    Right(PODS.resource, _MADE),
    Right(SERVICES.resource, ("get", "list", "watch", "create", "patch")),
    Right(CLAIMS.resource, _MADE),
    Right(JOBS.resource, _MADE),
    Right(
        NETWORK_POLICIES.resource,
        ("get", "create", "patch"),
        "jobs of queues with networking.isolate do not start",
    ),
    Right(CONFIG_MAPS.resource, _MADE, _QUEUES_OBJECTS),
    Right(
        EVENTS.resource, ("list", "watch"), "why pods are not made and claims not bound is not said"
    ),
    Right("events.events.k8s.io", ("create", "patch"), "no events are written"),
    *(
        Right(kind.resource, _MADE, _GANGS, addon=True)
        for kind in (KAI_POD_GROUPS, VOLCANO_POD_GROUPS, COSCHEDULING_POD_GROUPS)
    ),
    *(Right(kind.resource, _MADE, _GANGS, addon=True) for kind in NATIVE_GROUPS[1:]),
    Right(
        KUEUE_WORKLOADS[0].resource, ("list", "watch"), "why Kueue waits is not said", addon=True
    ),
    Right(NODES.resource, ("list", "watch"), "lost nodes are not noticed", cluster=True),
    Right(KAI_QUEUES.resource, _MADE, "KAI queues are not kept", cluster=True, addon=True),
    Right(KAI_TOPOLOGIES.resource, ("list",), "topologies are not known", cluster=True, addon=True),
)
PROGRESS = Right(
    "tokenreviews.authentication.k8s.io",
    ("create",),
    "workers cannot report progress",
    cluster=True,
)
LEASE = Right("leases.coordination.k8s.io", ("get", "watch", "create", "patch"))


Served: TypeAlias = Callable[[], Collection[str]]
"""The API groups of addons that are served now."""


class Requests(Protocol):
    """The part of the transport that reviews need."""

    async def request(self, method: str, path: str, *, body: bytes | None = ...) -> Response:
        """Send and read the whole answer; raises ApiError and Disconnected."""


class _Verdict(Wire, frozen=True, kw_only=True):
    allowed: bool


class _Review(Wire, frozen=True, kw_only=True):
    status: _Verdict


_decode = msgspec.json.Decoder(_Review).decode


class Asked(Struct, frozen=True):
    """One question: may this verb be used on this right's resource in a namespace, "" for all."""

    right: Right
    verb: str
    namespace: str


class Rights:
    """What is missing of the rights, kept up to date while `running`.

    Rights are asked for in each of `namespaces`, or cluster-wide where there are none; those on the
    lease in `lease_namespace`.
    """

    def __init__(
        self,
        namespaces: tuple[str, ...] = (),
        *,
        lease_namespace: str = "",
        progress: bool = False,
        observe: Callable[[str, str, int, float], None] = lambda *_: None,
    ) -> None:
        self._namespaces = namespaces or ("",)
        self._lease_namespace = lease_namespace
        self._progress = progress
        self._observe = observe
        self._missing: tuple[Asked, ...] = ()
        self._refused = False

    def observe(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """For the transport, so that a refusal is looked into; hands everything on."""
        if code == 403 and not any(asked.right.resource == resource for asked in self._missing):
            self._refused = True
        self._observe(verb, resource, code, seconds)

    def missing(self) -> str:
        """Readiness: the rights without which nothing goes; "" if all are there."""
        return _told([asked for asked in self._missing if not asked.right.without])

    def shortcoming(self) -> str:
        """The other rights that are missing, and what the controller does without; "" if none."""
        reasons: dict[str, list[Asked]] = {}
        for asked in self._missing:
            if asked.right.without:
                reasons.setdefault(asked.right.without, []).append(asked)
        return "; ".join(f"{without}: {_told(asked)}" for without, asked in reasons.items())

    @asynccontextmanager
    async def running(self, transport: Requests, served: Served) -> AsyncIterator[None]:
        """Ask again and again."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, transport, served)
            yield
            tasks.cancel_scope.cancel()

    async def look(self, transport: Requests, groups: Collection[str]) -> None:
        """Ask for every right once. Never raises for what the server does."""
        await self._ask(transport, tuple(self._questions(groups)))

    async def _run(self, transport: Requests, served: Served) -> None:
        await anyio.sleep(START_SECONDS)
        while True:
            try:
                await self._look_for_a_while(transport, served)
            except Exception:
                # What is known of the rights stands; readiness must not go blind for good.
                log.exception("a bug in the check of rights; please report it")
                await anyio.sleep(SECONDS)

    async def _look_for_a_while(self, transport: Requests, served: Served) -> None:
        """Ask for every right, then for those that are missing, until all are due again."""
        self._refused, groups = False, served()
        await self.look(transport, groups)
        for _ in range(LOOKS):
            await anyio.sleep(SECONDS)
            if self._refused or served() != groups:
                break
            await self._ask(transport, self._missing)

    async def _ask(self, transport: Requests, questions: tuple[Asked, ...]) -> None:
        try:
            missing = [asked for asked in questions if not await _may(transport, asked)]
        except (ApiError, Disconnected) as error:
            log.debug("rights are not known", error=str(error))
        else:
            self._set(tuple(missing))

    def _questions(self, groups: Collection[str]) -> Iterator[Asked]:
        for right in (*RIGHTS, *((PROGRESS,) if self._progress else ())):
            if right.addon and right.group not in groups:
                continue
            for namespace in ("",) if right.cluster else self._namespaces:
                yield from (Asked(right, verb, namespace) for verb in right.verbs)
        if self._lease_namespace:
            yield from (Asked(LEASE, verb, self._lease_namespace) for verb in LEASE.verbs)

    def _set(self, missing: tuple[Asked, ...]) -> None:
        if missing == self._missing:
            return
        self._missing = missing
        required, rest = self.missing(), self.shortcoming()
        if required:
            log.error("rights are missing", missing=required)
        if rest:
            log.warning("does without rights", missing=rest)
        if not missing:
            log.info("has all rights that it needs")


async def _may(transport: Requests, asked: Asked) -> bool:
    resource, _, subresource = asked.right.resource.partition("/")
    attributes: JsonObject = {
        "namespace": asked.namespace,
        "group": asked.right.group,
        "resource": resource.partition(".")[0],
        "subresource": subresource,
        "verb": asked.verb,
    }
    body: JsonObject = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await transport.request("POST", _PATH, body=msgspec.json.encode(body))
    return answer.read(_decode).status.allowed


def _told(missing: list[Asked]) -> str:
    """As `create, patch jobs.batch (in team-a)`, with what to do."""
    if not missing:
        return ""
    verbs: dict[tuple[str, str], list[str]] = {}
    for asked in missing:
        verbs.setdefault((asked.right.resource, asked.namespace), []).append(asked.verb)
    parts = [
        f"{', '.join(of)} {resource}" + (f" in {namespace}" if namespace else "")
        for (resource, namespace), of in verbs.items()
    ]
    return f"grant the controller's role {'; '.join(parts)}"
