"""The reads of the API server that a Plan asks for, before it is carried out.

`reconcile.model.plan.Check` says what each one is for.
"""

from typing import Any, Protocol

from torchrun_api.kinds.resources import JOBS, PODS, TORCHRUN_JOBS, Kind
from torchrun_controller.client.reads import LiveObject
from torchrun_controller.client.write_errors import SupersededError
from torchrun_controller.reconcile.model.messages import count_of
from torchrun_controller.reconcile.model.plan import (
    Check,
    GangIsGone,
    JobIsThere,
    NoPodIsUnseen,
    PodIsUnchanged,
)


class Finder(Protocol):
    """Reads single objects."""

    async def find(self, kind: Kind[Any], namespace: str, name: str) -> LiveObject | None:
        """See `LiveReader.find`."""


class Reader(Finder, Protocol):
    """Reads single objects and the pods of a job."""

    async def find_workers(self, namespace: str, job: str) -> frozenset[str]:
        """See `LiveReader.find_workers`."""


async def verify(reader: Reader, checks: tuple[Check, ...]) -> None:
    """Carry out the checks in their order.

    Raises SupersededError if the caches are behind, and what `LiveReader` raises.
    """
    for check in checks:
        problem = await _find_problem(reader, check)
        if problem:
            raise SupersededError(problem)


async def _find_problem(reader: Reader, check: Check) -> str:
    """Return what the caches do not show yet; "" if the check holds."""
    match check:
        case JobIsThere(namespace=namespace, name=name):
            job = await reader.find(TORCHRUN_JOBS, namespace, name)
            is_there = job is not None and job.uid == check.uid
            return "" if is_there else f"TorchrunJob {name!r} is gone"
        case GangIsGone(namespace=namespace, name=name):
            child = await reader.find(JOBS, namespace, name)
            runs = child is not None and child.controller == check.owner and not child.is_ending
            return f"Job {name!r} exists" if runs else ""
        case PodIsUnchanged(namespace=namespace, name=name):
            pod = await reader.find(PODS, namespace, name)
            is_unchanged = pod is not None and pod.version == check.resource_version
            return "" if is_unchanged else f"pod {name!r} has changed since it was seen"
        case NoPodIsUnseen(namespace=namespace, job=name):
            unseen = await reader.find_workers(namespace, name) - check.uids
            return (
                f"the cache of pods does not show {count_of(len(unseen), 'pod')}" if unseen else ""
            )
