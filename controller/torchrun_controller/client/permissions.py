"""Permissions that the controller needs, and which of them are missing.

`PERMISSIONS` equals manifests/rbac/role.yaml; a test compares them. The controller asks the API
server after the start, every few minutes, and after a 403: one SelfSubjectRulesReview for each
namespace, which lists what RBAC grants, and a SelfSubjectAccessReview for each verb that is not in
the list. Authorizers other than RBAC list no rules. Every account may create these reviews.
"""

from collections.abc import AsyncIterator, Callable, Collection, Iterator
from contextlib import asynccontextmanager
from typing import TypeAlias

import anyio
import msgspec
import structlog
from msgspec import Struct

from torchrun_api.json import JsonObject
from torchrun_api.kinds import (
    CLAIMS,
    EVENTS,
    JOBS,
    KAI_QUEUES,
    KAI_TOPOLOGIES,
    NETWORK_POLICIES,
    NODES,
    PODS,
    SERVICES,
    TORCHRUN_JOBS,
    TORCHRUN_QUEUES,
)
from torchrun_api.meta import Wire
from torchrun_controller.client import ApiError, Disconnected, Requests
from torchrun_controller.reconcile.schedulers.table import SCHEDULERS

CHECK_SECONDS = 10.0  # between two checks of the missing permissions, and after a 403
CHECKS = 30  # checks of the missing permissions until all are checked again
START_SECONDS = 2.0  # delay of the first check: nothing waits for it, and the start is busy

_MANAGED_VERBS = ("get", "list", "watch", "create", "patch", "delete")
_REVIEWS = "/apis/authorization.k8s.io/v1/selfsubjectaccessreviews"
_RULES = "/apis/authorization.k8s.io/v1/selfsubjectrulesreviews"
# The rules of a namespace without RoleBindings are those of all namespaces. It need not exist.
_NO_NAMESPACE = "torchrun-controller-no-namespace"

log: structlog.typing.FilteringBoundLogger = structlog.get_logger()


class Permission(Struct, frozen=True):
    """Verbs on a resource as RBAC names it: `jobs.batch`, `torchrunjobs.torchrun.ai/status`.

    without: what does not work if the permission is missing, "" if nothing works.
    cluster: the resource has no namespace. addon: needed only where the resource is served.
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


_WITHOUT_GANGS = "no groups are created for this scheduler"


def _group_permissions() -> Iterator[Permission]:
    """Yield the permission on the groups of each gang scheduler, once for each resource."""
    for scheduler in SCHEDULERS.values():
        for resource in dict.fromkeys(kind.resource for kind in scheduler.kinds):
            if scheduler.creates_groups:
                yield Permission(resource, _MANAGED_VERBS, _WITHOUT_GANGS, addon=True)
            else:
                without = f"jobs do not report why {scheduler.api.title} does not admit them"
                yield Permission(resource, ("list", "watch"), without, addon=True)


PERMISSIONS = (
    Permission(TORCHRUN_JOBS.resource, ("get", "list", "watch", "delete")),
    Permission(TORCHRUN_QUEUES.resource, ("list", "watch", "patch")),
    Permission(f"{TORCHRUN_JOBS.resource}/status", ("patch",)),
    Permission(f"{TORCHRUN_QUEUES.resource}/status", ("patch",)),
    Permission(PODS.resource, (*_MANAGED_VERBS, "deletecollection")),
    Permission(SERVICES.resource, ("get", "list", "watch", "create", "patch")),
    Permission(CLAIMS.resource, ("get", "list", "watch", "create", "patch")),
    Permission(JOBS.resource, _MANAGED_VERBS),
    Permission(
        NETWORK_POLICIES.resource,
        ("get", "create", "patch"),
        "jobs of queues with networking.isolate do not start",
    ),
    Permission(
        EVENTS.resource,
        ("list", "watch"),
        "jobs do not report why pods are not created or PVCs are not bound",
    ),
    Permission("events.events.k8s.io", ("create", "patch"), "no events are written"),
    *_group_permissions(),
    Permission(NODES.resource, ("list", "watch"), "lost nodes are not detected", cluster=True),
    Permission(
        KAI_QUEUES.resource,
        _MANAGED_VERBS,
        "KAI queues are not maintained",
        cluster=True,
        addon=True,
    ),
    Permission(
        KAI_TOPOLOGIES.resource,
        ("list",),
        "KAI topologies cannot be used",
        cluster=True,
        addon=True,
    ),
)
PROGRESS = Permission(
    "tokenreviews.authentication.k8s.io",
    ("create",),
    "workers cannot report progress",
    cluster=True,
)
LEASE = Permission("leases.coordination.k8s.io", ("get", "watch", "create", "patch"))


Served: TypeAlias = Callable[[], Collection[str]]
"""The API groups of addons that are served now."""


class _Allowed(Wire, frozen=True, kw_only=True):
    allowed: bool


class _Review(Wire, frozen=True, kw_only=True):
    status: _Allowed


class _Rule(Wire, frozen=True, kw_only=True):
    verbs: tuple[str, ...] | None = None
    api_groups: tuple[str, ...] | None = None
    resources: tuple[str, ...] | None = None
    resource_names: tuple[str, ...] | None = None


class _Rules(Wire, frozen=True, kw_only=True):
    resource_rules: tuple[_Rule, ...] | None = None


class _RulesReview(Wire, frozen=True, kw_only=True):
    status: _Rules


_decode = msgspec.json.Decoder(_Review).decode
_decode_rules = msgspec.json.Decoder(_RulesReview).decode


class AccessReview(Struct, frozen=True):
    """One verb of a permission to check in a namespace, "" for all namespaces."""

    permission: Permission
    verb: str
    namespace: str


class Permissions:
    """The missing permissions, kept up to date while `running`.

    Checks each of `namespaces`, or cluster-wide if there are none, and the lease in
    `lease_namespace`. The method `observe` passes each request on to the argument `observe`.
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
        self._missing: tuple[AccessReview, ...] = ()
        self._refused = False

    def observe(self, verb: str, resource: str, code: int, seconds: float) -> None:
        """Note a request: a 403 starts a new check. Calls `observe` with the same arguments."""
        missing_resources = {review.permission.resource for review in self._missing}
        if code == 403 and resource not in missing_resources:
            self._refused = True
        self._observe(verb, resource, code, seconds)

    def missing(self) -> str:
        """Readiness: the missing permissions without which nothing works, "" if none is missing."""
        left_out = self._left_out()
        required = (review for review in self._missing if not review.permission.without)
        return _format_advice([r for r in required if not _concerns_only(r, left_out)])

    def shortcoming(self) -> str:
        """The other missing permissions and what does not work without them, "" if none."""
        left_out = self._left_out()
        reasons: dict[str, list[AccessReview]] = {}
        for review in self._missing:
            without = review.permission.without
            if _concerns_only(review, left_out):
                without = f"no jobs run in namespace {review.namespace}"
            if without:
                reasons.setdefault(without, []).append(review)
        return "; ".join(
            f"{without}: {_format_advice(reviews)}" for without, reviews in reasons.items()
        )

    def _left_out(self) -> set[str]:
        """The namespaces that lack a required permission, such as deleted ones, unless all do."""
        namespaces = set(self._namespaces)
        required = (review for review in self._missing if not review.permission.without)
        left_out = {r.namespace for r in required if _concerns_only(r, namespaces)}
        return left_out if left_out < namespaces else set()

    @asynccontextmanager
    async def running(self, transport: Requests, served: Served) -> AsyncIterator[None]:
        """Check until the context ends."""
        async with anyio.create_task_group() as tasks:
            tasks.start_soon(self._run, transport, served)
            yield
            tasks.cancel_scope.cancel()

    async def check(self, transport: Requests, groups: Collection[str]) -> None:
        """Check each permission once. Does not raise for errors of the server."""
        reviews = tuple(self._build_reviews(groups))
        rules = {
            namespace: await _list_rules(transport, namespace)
            for namespace in dict.fromkeys(review.namespace for review in reviews)
        }
        unlisted = (
            review
            for review in reviews
            if not any(_grants(rule, review) for rule in rules[review.namespace])
        )
        await self._review_all(transport, tuple(unlisted))

    async def _run(self, transport: Requests, served: Served) -> None:
        await anyio.sleep(START_SECONDS)
        while True:
            try:
                await self._check_until_due(transport, served)
            except Exception:
                # The last result stays, so that readiness keeps working.
                log.exception("a bug in the check of permissions; please report it")
                await anyio.sleep(CHECK_SECONDS)

    async def _check_until_due(self, transport: Requests, served: Served) -> None:
        """Check each permission, then the missing ones until all are due again."""
        self._refused, groups = False, served()
        await self.check(transport, groups)
        for _ in range(CHECKS):
            await anyio.sleep(CHECK_SECONDS)
            if self._refused or served() != groups:
                break
            await self._review_all(transport, self._missing)

    async def _review_all(self, transport: Requests, reviews: tuple[AccessReview, ...]) -> None:
        try:
            missing = [review for review in reviews if not await _is_allowed(transport, review)]
        except (ApiError, Disconnected) as error:
            log.debug("cannot check permissions", error=str(error))
        else:
            self._set_missing(tuple(missing))

    def _build_reviews(self, groups: Collection[str]) -> Iterator[AccessReview]:
        for permission in (*PERMISSIONS, *((PROGRESS,) if self._progress else ())):
            if permission.addon and permission.group not in groups:
                continue
            for namespace in ("",) if permission.cluster else self._namespaces:
                yield from (AccessReview(permission, verb, namespace) for verb in permission.verbs)
        if self._lease_namespace:
            yield from (AccessReview(LEASE, verb, self._lease_namespace) for verb in LEASE.verbs)

    def _set_missing(self, missing: tuple[AccessReview, ...]) -> None:
        if missing == self._missing:
            return
        self._missing = missing
        required, rest = self.missing(), self.shortcoming()
        if required:
            log.error("required permissions are missing", missing=required)
        if rest:
            log.warning("some permissions are missing", missing=rest)
        if not missing:
            log.info("all permissions are granted")


def _concerns_only(review: AccessReview, namespaces: Collection[str]) -> bool:
    """Whether a missing permission stops the jobs of one of these namespaces, but no others."""
    return review.namespace in namespaces and review.permission is not LEASE


async def _list_rules(transport: Requests, namespace: str) -> tuple[_Rule, ...]:
    """Return the rules that RBAC grants in a namespace, "" for all; none if they are not known."""
    body: JsonObject = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectRulesReview",
        "spec": {"namespace": namespace or _NO_NAMESPACE},
    }
    try:
        answer = await transport.request("POST", _RULES, body=msgspec.json.encode(body))
        return answer.read(_decode_rules).status.resource_rules or ()
    except (ApiError, Disconnected) as error:
        log.debug("rules are not known", error=str(error))
        return ()


def _grants(rule: _Rule, review: AccessReview) -> bool:
    """Whether the rule grants the verb on all objects of the resource."""
    name, _, subresource = review.permission.resource.partition("/")
    resource = "/".join(part for part in (name.partition(".")[0], subresource) if part)
    needed = (
        (rule.verbs, review.verb),
        (rule.api_groups, review.permission.group),
        (rule.resources, resource),
    )
    return not rule.resource_names and all(
        value in (values or ()) or "*" in (values or ()) for values, value in needed
    )


async def _is_allowed(transport: Requests, review: AccessReview) -> bool:
    resource, _, subresource = review.permission.resource.partition("/")
    attributes: JsonObject = {
        "namespace": review.namespace,
        "group": review.permission.group,
        "resource": resource.partition(".")[0],
        "subresource": subresource,
        "verb": review.verb,
    }
    body: JsonObject = {
        "apiVersion": "authorization.k8s.io/v1",
        "kind": "SelfSubjectAccessReview",
        "spec": {"resourceAttributes": attributes},
    }
    answer = await transport.request("POST", _REVIEWS, body=msgspec.json.encode(body))
    return answer.read(_decode).status.allowed


def _format_advice(missing: list[AccessReview]) -> str:
    """Format as `grant ... create, patch jobs.batch in team-a`; "" for none."""
    if not missing:
        return ""
    verbs: dict[tuple[str, str], list[str]] = {}
    for review in missing:
        verbs.setdefault((review.permission.resource, review.namespace), []).append(review.verb)
    grants = [
        f"{', '.join(of)} {resource}" + (f" in {namespace}" if namespace else "")
        for (resource, namespace), of in verbs.items()
    ]
    return f"grant the controller's role {'; '.join(grants)}"
