"""The requests of each write, and the errors for each refusal."""

import json
from typing import Any

import pytest
from msgspec.structs import replace

from garbled import GARBLED
from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import JOBS, SECRETS, SERVICES
from torchrun_api.kinds.status import TorchrunJobStatus
from torchrun_controller.client import ApiError, Disconnected
from torchrun_controller.client.apply import (
    ABSENT,
    APPLY_PATCH,
    FIELD_MANAGER,
    MERGE_PATCH,
    Applier,
)
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.client.write_errors import (
    NameConflictError,
    RejectedError,
    SupersededError,
    UnavailableError,
)
from torchrun_controller.reconcile.model.plan import Apply, Delete
from unit.client.wire import (
    JOB,
    OTHER_UID,
    OWNER,
    PODS_OF_A_JOB,
    Open,
    Wire,
    answer,
    intent,
    refusal,
)


class LostError(Exception):
    pass


class Closed:
    def check(self) -> None:
        raise LostError


async def test_a_dry_run_creates_nothing_on_the_server() -> None:
    wire = Wire(answer())
    await Applier(wire, Open()).dry_run(intent())
    (request,) = wire.requests
    assert request.method == "PATCH"
    assert request.query == {"fieldManager": FIELD_MANAGER, "dryRun": "All"}
    assert request.body["metadata"]["resourceVersion"] == ABSENT


@pytest.mark.parametrize("error", [Disconnected("reset"), refusal(503, "reset")])
async def test_a_dry_run_without_an_answer_is_retried(error: Exception) -> None:
    with pytest.raises(UnavailableError, match="reset"):
        await Applier(Wire(error), Open()).dry_run(intent())


async def test_a_write_is_no_dry_run() -> None:
    wire = Wire(answer())
    await Applier(wire, Open()).apply(intent())
    assert "dryRun" not in wire.requests[0].query


async def test_a_taken_name_with_an_unreadable_owner_is_retried() -> None:
    wire = Wire(refusal(409), refusal(503))
    with pytest.raises(UnavailableError):
        await Applier(wire, Open()).apply(intent())
    assert [request.method for request in wire.requests] == ["PATCH", "GET"]


async def test_creation_requires_absence_and_does_not_force() -> None:
    wire = Wire(answer())
    wish = intent()
    before = json.dumps(wish.body)
    written = await Applier(wire, Open()).apply(wish)
    (request,) = wire.requests
    assert (request.method, request.path) == ("PATCH", "/api/v1/namespaces/team/services/run")
    assert request.query == {"fieldManager": "torchrun-controller"}
    assert wire.content_types == [APPLY_PATCH]
    assert request.body["metadata"]["resourceVersion"] == "1"
    assert request.body["spec"] == {"clusterIP": "None"}
    assert json.dumps(wish.body) == before, "a write must not change the Plan"
    assert (written.kind, written.name, written.uid) == (SERVICES, "run", "u")
    assert written.resource_version == "7"
    assert written.created


async def test_a_known_object_is_forced_by_its_uid() -> None:
    wire = Wire(answer())
    await Applier(wire, Open()).apply(intent(uid="known"))
    (request,) = wire.requests
    assert request.query == {"fieldManager": "torchrun-controller", "force": "true"}
    assert request.body["metadata"]["uid"] == "known"
    assert "resourceVersion" not in request.body["metadata"]


async def test_a_merge_is_no_apply() -> None:
    wire = Wire(answer())
    await Applier(wire, Open()).apply(replace(intent(uid="known"), merge=True))
    (request,) = wire.requests
    assert wire.content_types == [MERGE_PATCH]
    assert request.query == {"fieldManager": "torchrun-controller"}, "the server refuses force"
    assert request.body["metadata"]["uid"] == "known"


async def test_status_has_its_own_field_manager_and_preconditions() -> None:
    wire = Wire(answer())
    status = TorchrunJobStatus(phase="Running", observed_generation=1)
    await Applier(wire, Open()).apply_status(JOB, status)
    (request,) = wire.requests
    assert request.path == "/apis/torchrun.ai/v1alpha1/namespaces/team/torchrunjobs/run/status"
    assert request.query == {"fieldManager": "torchrun-controller-status", "force": "true"}
    assert request.body == {
        "apiVersion": "torchrun.ai/v1alpha1",
        "kind": "TorchrunJob",
        "metadata": {
            "name": "run",
            "namespace": "team",
            "uid": "job-uid",
            "resourceVersion": "41",
        },
        "status": {"phase": "Running", "observedGeneration": 1},
    }


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (refusal(503), UnavailableError),
        (refusal(403), ApiError),
        (Disconnected("x"), UnavailableError),
    ],
)
async def test_an_object_that_cannot_be_read_is_not_absent(
    error: Exception, raised: type[Exception]
) -> None:
    with pytest.raises(raised):
        await Applier(Wire(error), Open()).find(JOBS, "team", "run")
    assert await Applier(Wire(refusal(404)), Open()).find(JOBS, "team", "run") is None


@pytest.mark.parametrize("times", [{}, {"deletionTimestamp": "2026-01-01T00:00:00Z"}])
async def test_an_object_that_is_being_deleted_is_found_as_such(times: dict[str, str]) -> None:
    live = await Applier(Wire(answer("job-uid", **times)), Open()).find(JOBS, "team", "run")
    assert live == LiveObject("job-uid", "", is_ending=bool(times), version="7")


async def test_a_deleted_object_needs_no_status() -> None:
    assert await Applier(Wire(refusal(404)), Open()).apply_status(JOB, TorchrunJobStatus()) is None


async def test_a_status_applies_to_the_observed_object_only() -> None:
    with pytest.raises(SupersededError):
        await Applier(Wire(refusal(409)), Open()).apply_status(JOB, TorchrunJobStatus())


async def test_nothing_is_written_without_leadership() -> None:
    wire = Wire()
    applier = Applier(wire, Closed())
    for write in (
        applier.apply(intent()),
        applier.apply(intent("u")),
        applier.apply_status(JOB, TorchrunJobStatus()),
        applier.delete(Delete(kind=JOBS, namespace="n", name="x", uid="u")),
        applier.delete(PODS_OF_A_JOB),
    ):
        with pytest.raises(LostError):
            await write
    assert wire.requests == []


TYPED = "failed to create typed patch object (n/x; batch/v1, Kind=Job): .spec.foo: not declared"
CONVERTED = "failed to convert new object (n/x; batch/v1, Kind=Job) to proper version: quantities"


@pytest.mark.parametrize(
    ("error", "permanent"),
    [
        (refusal(422, "invalid"), True),
        (refusal(400, "bad"), True),
        (refusal(500, TYPED), True),
        (refusal(500, CONVERTED), True),
        (refusal(413, "request entity too large"), True),
        (refusal(500, "etcdserver: request is too large"), True),
        (refusal(500, "trying to send message larger than max (3 MB)"), True),
        (refusal(403, "exceeded quota"), False),
    ],
)
async def test_a_refused_object_is_a_rejection_with_the_server_message(
    error: ApiError, permanent: bool
) -> None:
    with pytest.raises(RejectedError) as caught:
        await Applier(Wire(error), Open()).apply(intent())
    assert caught.value.permanent is permanent
    rejection = caught.value.rejection
    assert (rejection.resource, rejection.name) == ("services", "run")
    assert rejection.message == str(caught.value) == error.message


async def test_a_webhook_that_does_not_answer_refuses_its_object_only() -> None:
    message = 'Internal error occurred: failed calling webhook "w.x.io": connection refused'
    delete = Delete(kind=JOBS, namespace="n", name="x", uid="u")
    applier = Applier(Wire(*[refusal(500, message)] * 4), Open())
    for write, verb in (
        (applier.apply(intent()), "apply"),
        (applier.apply(intent("u")), "apply"),
        (applier.dry_run(intent()), "apply"),
        (applier.delete(delete), "delete"),
    ):
        with pytest.raises(RejectedError) as caught:
            await write
        assert not caught.value.permanent
        assert (caught.value.rejection.message, caught.value.rejection.verb) == (message, verb)


@pytest.mark.parametrize(
    ("error", "retry_after"),
    [
        (refusal(429, retry_after=3), 3),
        (refusal(500, "etcdserver: leader changed"), None),
        (refusal(503), None),
        (Disconnected("lost"), None),
    ],
)
async def test_an_unavailable_server_is_retried(
    error: Exception, retry_after: float | None
) -> None:
    delete = Delete(kind=JOBS, namespace="n", name="x", uid="u")
    applier = Applier(Wire(*[error] * 4), Open())
    for write in (
        applier.apply(intent()),
        applier.apply(intent("u")),
        applier.apply_status(JOB, TorchrunJobStatus()),
        applier.delete(delete),
    ):
        with pytest.raises(UnavailableError) as caught:
            await write
        assert caught.value.retry_after == retry_after


@pytest.mark.parametrize(
    "message",
    [
        "etcdserver: request is too large",
        "rpc error: code = ResourceExhausted desc = trying to send message larger than max",
        'Internal error occurred: failed calling webhook "w.x.io": connection refused',
    ],
)
async def test_a_status_that_is_not_stored_is_refused(message: str) -> None:
    with pytest.raises(ApiError) as caught:
        await Applier(Wire(refusal(500, message)), Open()).apply_status(JOB, TorchrunJobStatus())
    assert caught.value.message == message


async def test_other_errors_are_raised_unchanged() -> None:
    with pytest.raises(ApiError) as caught:
        await Applier(Wire(refusal(404)), Open()).apply(intent())
    assert caught.value.status == 404
    assert caught.value.__cause__ is None


@pytest.mark.parametrize("error", [refusal(409), OTHER_UID])
async def test_a_replaced_object_is_superseded(error: ApiError) -> None:
    with pytest.raises(SupersededError):
        await Applier(Wire(error), Open()).apply(intent(uid="old"))


async def test_an_own_object_that_the_cache_missed_counts_as_created() -> None:
    held = answer(uid="mine", version="9", ownerReferences=[OWNER])
    written = await Applier(Wire(refusal(409), held), Open()).apply(intent())
    assert (written.uid, written.resource_version) == ("mine", "9")
    assert not written.created, "its creation was reported before"


FOREIGN_OWNER = {"apiVersion": "apps/v1", "kind": "Deployment", "name": "web", "controller": True}


@pytest.mark.parametrize(
    ("held", "whose"),
    [
        (answer(ownerReferences=[{**FOREIGN_OWNER, "uid": "f"}]), "belongs to Deployment 'web'"),
        (answer(managedFields=[{"manager": "kubectl-create"}]), "was created by kubectl-create"),
        (answer(), "was created by another client"),
        # Our name and label, but no owner, as after kubectl delete --cascade=orphan.
        (answer(ownerReferences=[{**OWNER, "controller": False}]), "was created by another client"),
    ],
)
async def test_another_owner_is_named_and_left_alone(held: JsonObject, whose: str) -> None:
    wire = Wire(refusal(409), held)
    with pytest.raises(NameConflictError) as caught:
        await Applier(wire, Open()).apply(intent())
    conflict = caught.value.conflict
    assert (conflict.resource, conflict.name) == ("services", "run")
    assert str(caught.value) == conflict.message
    assert conflict.message.startswith(f"Service 'run' already exists and {whose}. Delete")
    assert [request.method for request in wire.requests] == ["PATCH", "GET"]


@pytest.mark.parametrize(
    "held",
    [
        answer(ownerReferences=[OWNER], deletionTimestamp="2026-01-01T00:00:00Z"),
        answer(ownerReferences=[{**OWNER, "uid": "earlier job of this name"}]),
        refusal(404),
    ],
)
async def test_a_terminating_owner_is_waited_for(held: JsonObject | Exception) -> None:
    with pytest.raises(SupersededError):
        await Applier(Wire(refusal(409), held), Open()).apply(intent())


async def test_a_retained_claim_is_recognised_by_its_label() -> None:
    label: JsonObject = {"torchrun.ai/retained-from": "run"}
    meta: JsonObject = {"name": "run-checkpoints", "namespace": "team", "labels": label}
    wish = Apply(SERVICES, {"metadata": meta})
    await Applier(Wire(refusal(409), answer(labels=label)), Open()).apply(wish)
    other = {"torchrun.ai/retained-from": "other"}
    with pytest.raises(NameConflictError):
        await Applier(Wire(refusal(409), answer(labels=other)), Open()).apply(wish)


@pytest.mark.parametrize("body", GARBLED)
async def test_a_write_with_a_garbage_response_is_retried(body: bytes) -> None:
    for uid in ("", "u"):
        with pytest.raises(UnavailableError, match="unexpected response"):
            await Applier(Wire(body), Open()).apply(intent(uid))
    with pytest.raises(UnavailableError):
        await Applier(Wire(refusal(409), body), Open()).apply(intent())
    with pytest.raises(UnavailableError):
        await Applier(Wire(body), Open()).apply_status(JOB, TorchrunJobStatus())
    with pytest.raises(UnavailableError):
        await Applier(Wire(body), Open()).find(JOBS, "team", "run")


SECRET = Apply(
    SECRETS, {"metadata": {"name": "run-gang-1234", "namespace": "team"}, "immutable": True}
)


@pytest.mark.parametrize(
    ("reply", "created"), [(answer(), True), (ApiError(409, "AlreadyExists", "taken"), False)]
)
async def test_a_secret_gets_a_random_key_and_is_never_read(reply: Any, created: bool) -> None:
    wire, keys = Wire(reply), []
    for _ in range(2):
        wire = Wire(reply)
        assert (await Applier(wire, Open()).apply(SECRET)).created == created
        (request,) = wire.requests
        assert (request.method, request.path) == ("POST", "/api/v1/namespaces/team/secrets")
        keys.append(request.body["stringData"]["key"])
    assert len({*keys}) == 2
    assert all(len(key) == 64 for key in keys)


@pytest.mark.parametrize(
    ("reply", "error"),
    [
        (refusal(403, "Forbidden"), RejectedError),
        (refusal(409, "Conflict"), SupersededError),
        (refusal(503, "ServiceUnavailable"), UnavailableError),
        (Disconnected("reset"), UnavailableError),
    ],
)
async def test_a_secret_that_is_not_created_is_tried_again(
    reply: Any, error: type[Exception]
) -> None:
    with pytest.raises(error):
        await Applier(Wire(reply), Open()).apply(SECRET)
