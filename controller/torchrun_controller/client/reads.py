"""Reads of the API server past the caches."""

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from msgspec import Struct

from torchrun_api import names
from torchrun_api.kinds.meta import find_controller
from torchrun_api.kinds.resources import PODS, Kind
from torchrun_controller.client.errors import ApiError, Disconnected
from torchrun_controller.client.responses import read_children, read_object
from torchrun_controller.client.session import Requests
from torchrun_controller.client.write_errors import UnavailableError, raise_if_unavailable
from torchrun_controller.reconcile.pods.lifecycle import is_worker_of

# Selects the pods that have not ended.
NOT_ENDED = "status.phase!=Succeeded,status.phase!=Failed"
# The API server returns the pods of a list or of a deleted collection, with their metadata only.
METADATA_ONLY = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

T = TypeVar("T")


class LiveObject(Struct, frozen=True):
    """The state of an object on the API server, read past the caches.

    `controller` is the UID of its controller, "" for none; `version` is its resourceVersion.
    """

    uid: str
    controller: str
    is_ending: bool
    version: str = ""


class LiveReader:
    """Reads single objects and the pods of a job. Has no state of its own."""

    def __init__(self, transport: Requests) -> None:
        self._transport = transport

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        """Read an object from the API server, past the caches; None if it does not exist.

        Raises:
            UnavailableError: retry later.
            ApiError: any other refusal.
        """
        try:
            meta = await self._get(kind.path(namespace, name), read_object)
        except ApiError as error:
            if error.status == 404:
                return None
            raise
        controller = find_controller(meta.owner_references)
        controller_uid = "" if controller is None else controller.uid
        is_ending = meta.deletion_timestamp is not None
        return LiveObject(meta.uid, controller_uid, is_ending, meta.resource_version)

    async def find_workers(self, namespace: str, job: str) -> frozenset[str]:
        """Return the UIDs of the pods of the job's gangs that have not ended, past the caches.

        Raises:
            UnavailableError: retry later.
            ApiError: any other refusal.
        """
        labels = f"{names.JOB_LABEL}={job},{names.COMPONENT_LABEL}={names.WORKER}"
        query = {"labelSelector": labels, "fieldSelector": NOT_ENDED}
        headers = {"Accept": METADATA_ONLY}
        pods = await self._get(PODS.path(namespace), read_children, query=query, headers=headers)
        return frozenset(meta.uid for meta in pods if is_worker_of(job, meta))

    async def _get(
        self,
        path: str,
        read: Callable[[bytes], T],
        query: Mapping[str, str] = {},
        headers: Mapping[str, str] = {},
    ) -> T:
        try:
            response = await self._transport.request("GET", path, query=query, headers=headers)
            return response.read(read)
        except ApiError as error:
            raise_if_unavailable(error)
            raise
        except Disconnected as error:
            raise UnavailableError(str(error)) from error
