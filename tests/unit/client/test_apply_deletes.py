"""Deletes: their preconditions, and what each refusal means."""

import pytest

from torchrun_api.json import JsonObject
from torchrun_api.kinds.resources import JOBS
from torchrun_controller.client import ApiError, Disconnected
from torchrun_controller.client.apply import Applier
from torchrun_controller.client.write_errors import SupersededError, UnavailableError
from torchrun_controller.reconcile.model.plan import Delete
from unit.client.wire import OTHER_UID, PODS_OF_A_JOB, Open, Wire, answer, refusal


async def test_delete_carries_its_preconditions() -> None:
    wire = Wire(answer())
    delete = Delete(kind=JOBS, namespace="team", name="run", uid="u", resource_version="5")
    deleted = await Applier(wire, Open()).delete(delete)
    assert deleted is not None
    assert (deleted.name, deleted.uid, deleted.resource_version) == ("run", "u", "7")
    (request,) = wire.requests
    assert (request.method, request.path) == ("DELETE", "/apis/batch/v1/namespaces/team/jobs/run")
    assert request.body == {
        "preconditions": {"uid": "u", "resourceVersion": "5"},
        "propagationPolicy": "Background",
    }


async def test_the_pods_of_a_job_are_selected_by_its_uid() -> None:
    wire = Wire({"kind": "PartialObjectMetadataList", "items": []})
    assert await Applier(wire, Open()).delete(PODS_OF_A_JOB) is None
    (request,) = wire.requests
    assert (request.method, request.path) == ("DELETE", "/api/v1/namespaces/team/pods")
    assert request.query == {
        "labelSelector": "batch.kubernetes.io/controller-uid=u",
        "fieldSelector": "status.phase!=Succeeded,status.phase!=Failed",
    }
    assert request.body == {"propagationPolicy": "Background", "gracePeriodSeconds": 5}


@pytest.mark.parametrize("error", [refusal(504), refusal(429), refusal(409), Disconnected("reset")])
async def test_a_collection_that_is_deleted_in_part_is_retried(error: Exception) -> None:
    # No object has the name of the Job among the pods.
    with pytest.raises(UnavailableError):
        await Applier(Wire(error, refusal(404)), Open()).delete(PODS_OF_A_JOB)


@pytest.mark.parametrize("present", [answer(uid="another"), refusal(404)])
async def test_a_conflict_means_gone_if_the_object_is_gone_or_replaced(
    present: JsonObject | ApiError,
) -> None:
    wire = Wire(refusal(409), present)
    delete = Delete(kind=JOBS, namespace="n", name="x", uid="u", resource_version="5")
    assert await Applier(wire, Open()).delete(delete) is None
    assert [request.method for request in wire.requests] == ["DELETE", "GET"]


@pytest.mark.parametrize("version", ["", "5"])
async def test_a_conflict_over_the_same_object_is_reconciled_again(version: str) -> None:
    """The object has changed since it was observed. For example, a Job has completed."""
    wire = Wire(refusal(409), answer(uid="u"))
    delete = Delete(kind=JOBS, namespace="n", name="x", uid="u", resource_version=version)
    with pytest.raises(SupersededError, match="Job 'x' has changed"):
        await Applier(wire, Open()).delete(delete)


async def test_a_conflict_with_an_unreadable_object_is_retried() -> None:
    wire = Wire(refusal(409), Disconnected("reset"))
    with pytest.raises(UnavailableError, match="reset"):
        await Applier(wire, Open()).delete(Delete(kind=JOBS, namespace="n", name="x", uid="u"))


@pytest.mark.parametrize("error", [refusal(404), OTHER_UID])
async def test_a_deleted_object_needs_no_delete(error: ApiError) -> None:
    applier = Applier(Wire(error), Open())
    assert await applier.delete(Delete(kind=JOBS, namespace="n", name="x", uid="u")) is None
