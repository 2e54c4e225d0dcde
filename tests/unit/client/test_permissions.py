"""Permissions: code and role agree, and missing permissions are reported."""

import asyncio
import json
from collections.abc import Callable

import pytest
import structlog

from garbled import GARBLED
from roles import granted
from torchrun_controller.client import Disconnected, Response
from torchrun_controller.client.permissions import (
    LEASE,
    PERMISSIONS,
    PROGRESS,
    Permission,
    Permissions,
)


class Reviewer:
    """Answers reviews; `denied` are pairs of verb and resource.

    `rules` are those that RBAC lists. Other authorizers list none.
    """

    def __init__(self, *denied: tuple[str, str]) -> None:
        self.denied = set(denied)
        self.deleted_namespace = "no-namespace"
        self.rules: list[dict[str, list[str]]] | None = None
        self.namespaces: list[str] = []  # those whose rules were listed
        self.reviews: list[tuple[str, str, str]] = []
        self.is_down = False
        self.garbage = b""
        self.bugs = 0

    async def request(self, method: str, path: str, *, body: bytes | None = None) -> Response:
        if self.is_down:
            raise Disconnected("no answer")
        if self.bugs:
            self.bugs -= 1
            raise ZeroDivisionError
        if self.garbage:
            return Response(201, self.garbage)
        spec = json.loads(body or b"")["spec"]
        if path.endswith("selfsubjectrulesreviews"):
            self.namespaces.append(spec["namespace"])
            rules = {"incomplete": self.rules is None, "resourceRules": self.rules}
            return Response(201, json.dumps({"status": rules}).encode(), "")
        attributes = spec["resourceAttributes"]
        group = f".{attributes['group']}" if attributes["group"] else ""
        part = f"/{attributes['subresource']}" if attributes["subresource"] else ""
        resource = f"{attributes['resource']}{group}{part}"
        self.reviews.append((attributes["verb"], resource, attributes["namespace"]))
        is_deleted = attributes["namespace"] == self.deleted_namespace
        allowed = not is_deleted and (attributes["verb"], resource) not in self.denied
        return Response(201, json.dumps({"status": {"allowed": allowed}}).encode(), "")


def needed(*rights: Permission) -> set[tuple[str, str]]:
    return {(verb, right.resource) for right in rights for verb in right.verbs}


def test_the_role_has_exactly_the_permissions_of_the_controller() -> None:
    own = [right for right in PERMISSIONS if not right.cluster]
    cluster = [right for right in PERMISSIONS if right.cluster]
    assert granted("torchrun-controller") == needed(*own)
    assert granted("torchrun-controller-cluster") == needed(*cluster, PROGRESS)
    assert granted("torchrun-controller-leader-election") == needed(LEASE)


async def test_missing_permissions_are_named_by_verb_and_resource() -> None:
    rights = Permissions(lease_namespace="system", progress=True)
    reviewer = Reviewer(
        *(("create", "jobs.batch"), ("patch", "jobs.batch"), ("watch", LEASE.resource)),
        *(("list", "nodes"), ("create", "events.events.k8s.io"), ("create", PROGRESS.resource)),
    )
    await rights.check(reviewer, ())
    assert rights.missing() == (
        "grant the controller's role create, patch jobs.batch;"
        " watch leases.coordination.k8s.io in system"
    )
    assert rights.shortcoming() == (
        "no events are written: grant the controller's role create events.events.k8s.io;"
        " lost nodes are not detected: grant the controller's role list nodes;"
        " workers cannot report progress: grant the controller's role create"
        " tokenreviews.authentication.k8s.io"
    )
    reviewer.is_down = True
    await rights.check(reviewer, ())
    assert "jobs.batch" in rights.missing(), "an unknown result does not clear it"
    reviewer.is_down, reviewer.denied = False, set()
    await rights.check(reviewer, ())
    assert rights.missing() == rights.shortcoming() == ""


async def test_permissions_are_checked_in_the_watched_namespaces() -> None:
    reviewer = Reviewer(("list", "pods"))
    rights = Permissions(("team-a", "team-b"))
    await rights.check(reviewer, ())
    reviewed = {(namespace, resource) for _, resource, namespace in reviewer.reviews}
    assert {("team-a", "pods"), ("team-b", "pods"), ("", "nodes")} <= reviewed
    assert ("", "pods") not in reviewed
    assert rights.missing() == (
        "grant the controller's role list pods in team-a; list pods in team-b"
    )
    assert rights.shortcoming() == ""


async def test_a_namespace_without_permissions_does_not_stop_the_others() -> None:
    reviewer = Reviewer(("watch", LEASE.resource), ("list", "events"))
    reviewer.deleted_namespace = "team-b"
    rights = Permissions(("team-a", "team-b"), lease_namespace="system")
    await rights.check(reviewer, ())
    assert (
        rights.missing() == "grant the controller's role watch leases.coordination.k8s.io in system"
    )
    shortcoming = rights.shortcoming()
    assert "no jobs run in namespace team-b: grant the controller's role get, list" in shortcoming
    assert "not bound: grant the controller's role list events in team-a" in shortcoming


def role(
    *resources: str, verbs: tuple[str, ...] = ("*",), **others: list[str]
) -> dict[str, list[str]]:
    return {"verbs": [*verbs], "apiGroups": ["*"], "resources": [*resources], **others}


async def test_permissions_that_rbac_lists_are_not_asked_for_one_by_one() -> None:
    reviewer, rights = Reviewer(), Permissions(lease_namespace="system", progress=True)
    reviewer.rules = [role("*")]
    await rights.check(reviewer, ())
    assert reviewer.reviews == []
    assert reviewer.namespaces == ["torchrun-controller-no-namespace", "system"]
    assert rights.missing() == rights.shortcoming() == ""


async def test_permissions_that_rbac_does_not_list_are_asked_for() -> None:
    reviewer, rights = Reviewer(("list", "pods")), Permissions()
    reviewer.rules = [
        role("pods", verbs=("get", "watch", "create", "patch", "delete", "deletecollection")),
        role("pods", verbs=("list",), resourceNames=["one"]),
        {"verbs": ["list"], "apiGroups": ["metrics.k8s.io"], "resources": ["pods"]},
        {"verbs": ["patch"], "apiGroups": ["torchrun.ai"], "resources": ["torchrunjobs/status"]},
    ]
    await rights.check(reviewer, ())
    pods = [verb for verb, resource, _ in reviewer.reviews if resource == "pods"]
    assert pods == ["list"]
    resources = {resource for _, resource, _ in reviewer.reviews}
    assert "torchrunjobs.torchrun.ai/status" not in resources
    assert "torchrunjobs.torchrun.ai" in resources
    assert rights.missing() == "grant the controller's role list pods"


async def test_permissions_of_schedulers_matter_if_their_kinds_are_served() -> None:
    group = "scheduling.volcano.sh"
    reviewer = Reviewer(("delete", f"podgroups.{group}"))
    rights = Permissions()
    await rights.check(reviewer, ())
    assert rights.shortcoming() == ""
    await rights.check(reviewer, {group})
    assert f"delete podgroups.{group}" in rights.shortcoming()


async def test_missing_permissions_are_checked_again_and_after_a_refusal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("torchrun_controller.client.permissions.CHECK_SECONDS", 0.001)
    monkeypatch.setattr("torchrun_controller.client.permissions.START_SECONDS", 0)
    monkeypatch.setattr("torchrun_controller.client.permissions.CHECKS", 1_000_000)
    requests: list[tuple[str, str, int, float]] = []
    rights = Permissions(observe=lambda *request: requests.append(request))
    reviewer, groups = Reviewer(("list", "pods")), {"scheduling.run.ai"}

    async def until(done: Callable[[], bool]) -> None:
        async with asyncio.timeout(60):
            while not done():  # noqa: ASYNC110 the world has no such event
                await asyncio.sleep(0)

    async with rights.running(reviewer, lambda: frozenset(groups)):
        await until(lambda: "list pods" in rights.missing())
        looks = reviewer.reviews.count(("list", "services", ""))
        reviewer.denied = set()
        await until(lambda: not rights.missing())
        assert reviewer.reviews.count(("list", "services", "")) == looks, "the present permission"
        reviewer.denied = {("create", "services")}
        rights.observe("patch", "services", 403, 0.1)
        await until(lambda: "create services" in rights.missing())
        reviewer.denied = {("list", "podgroups.scheduling.volcano.sh")}
        await until(lambda: not rights.missing())
        groups.add("scheduling.volcano.sh")
        await until(lambda: "podgroups.scheduling.volcano.sh" in rights.shortcoming())
    assert requests == [("patch", "services", 403, 0.1)]


@pytest.mark.parametrize("body", GARBLED)
async def test_garbage_changes_nothing(body: bytes) -> None:
    reviewer, rights = Reviewer(("list", "pods")), Permissions()
    await rights.check(reviewer, ())
    reviewer.garbage = body
    await rights.check(reviewer, ())
    assert rights.missing() == "grant the controller's role list pods"


async def test_a_bug_is_logged_and_the_checks_continue(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchrun_controller.client.permissions.CHECK_SECONDS", 0.001)
    monkeypatch.setattr("torchrun_controller.client.permissions.START_SECONDS", 0)
    reviewer, rights = Reviewer(("list", "pods")), Permissions()
    reviewer.bugs = 2
    with structlog.testing.capture_logs() as lines:
        async with rights.running(reviewer, frozenset), asyncio.timeout(60):
            while not rights.missing():  # noqa: ASYNC110 the world has no such event
                await asyncio.sleep(0.001)
    bugs = [line for line in lines if line["event"].startswith("a bug in the check of permissions")]
    assert len(bugs) == 2
    assert all(line["exc_info"] for line in bugs)
