"""Counters of one decision: what queues use of their own quota and of their cohort's.

Within a cohort, the quotas of the members that limit a resource are added up; a member that does
not limit it neither lends nor borrows it. A queue without a cohort forms a cohort of its own.
"""

from collections.abc import Iterator

from torchrun_controller.reconcile.admission.model import Amounts, QuotaLimits, Workload

RESOURCES = ("nodes", "gpus", "cpu", "memory", "jobs")
Usage = tuple[int, int, int, int, int]


def usage_of(workload: Workload, pods: int, jobs: int = 1) -> Usage:
    """Return the charge of this many pods of a workload, in the order of RESOURCES.

    With `jobs` 0 they are additional pods of a job that is charged already.
    """
    head = workload.head if jobs else None
    workers = pods if head is None else pods - 1
    cpu, memory = (
        workload.pod.get(name, 0) * workers + (0 if head is None else head.get(name, 0))
        for name in ("cpu", "memory")
    )
    gpus = workload.gpus * workers + (0 if head is None else workload.head_gpus)
    return pods, gpus, cpu, memory, jobs


def cost_of(usage: Usage) -> int:
    """Return the cost of a turn: GPUs, or nodes for a workload without GPUs."""
    return usage[1] or usage[0]


class Cohort:
    """The quotas of all members and their use, by resource."""

    def __init__(self) -> None:
        self.limit = [0] * len(RESOURCES)
        self.used = [0] * len(RESOURCES)


class QueueQuota:
    """The use and the limits of one queue, and its cohort.

    `used` includes what is promised to workloads that wait for the end of preempted ones.
    """

    def __init__(self, limits: QuotaLimits, cohort: Cohort) -> None:
        own_limits = ((resource, getattr(limits, name)) for resource, name in enumerate(RESOURCES))
        self.limits: dict[int, int] = {r: limit for r, limit in own_limits if limit is not None}
        self.used = [0] * len(RESOURCES)
        self._promised = [0] * len(RESOURCES)
        self.cohort = cohort
        for resource, limit in self.limits.items():
            cohort.limit[resource] += limit

    def add(self, usage: Usage, times: int = 1) -> None:
        """Count the usage; `times` -1 removes it."""
        for resource, amount in enumerate(usage):
            self.used[resource] += amount * times
        for resource in self.limits:
            self.cohort.used[resource] += usage[resource] * times

    def promise(self, usage: Usage) -> None:
        """Count the usage of a workload that is not admitted yet."""
        self.add(usage)
        for resource, amount in enumerate(usage):
            self._promised[resource] += amount

    def shortage(self, usage: Usage) -> int | None:
        """Return the first resource that falls short, borrowed quota included."""
        return next(self.shortages(usage), None)

    def shortages(self, usage: Usage) -> Iterator[int]:
        """Yield each resource that falls short, borrowed quota included."""
        used, limit = self.cohort.used, self.cohort.limit
        for resource in self.limits:
            if usage[resource] and used[resource] + usage[resource] > limit[resource]:
                yield resource

    def limited(self, usage: Usage) -> list[int]:
        """Return the resources of this usage that the queue limits, and so shares."""
        return [resource for resource in self.limits if usage[resource]]

    def exceeded(self, usage: Usage) -> int | None:
        """Return the first resource that falls short even with nothing in use."""
        return next((r for r in self.limits if usage[r] > self.cohort.limit[r]), None)

    def borrows(self, usage: Usage) -> set[int]:
        """Return the resources of which the usage exceeds what is left of the queue's own quota."""
        return {
            resource
            for resource, limit in self.limits.items()
            if usage[resource] and self.used[resource] + usage[resource] > limit
        }

    def borrowed(self) -> set[int]:
        """Return the resources that admitted workloads use beyond the queue's own quota."""
        return {r for r, limit in self.limits.items() if self.used[r] - self._promised[r] > limit}

    def report(self) -> tuple[Amounts, QuotaLimits, Amounts]:
        """Return what admitted workloads use, leave of the queue's own quota, and borrow."""
        used = [total - promised for total, promised in zip(self.used, self._promised, strict=True)]
        free = {RESOURCES[r]: max(0, limit - used[r]) for r, limit in self.limits.items()}
        borrowed = {RESOURCES[r]: max(0, used[r] - limit) for r, limit in self.limits.items()}
        in_use = dict(zip(RESOURCES, used, strict=True))
        return Amounts(**in_use), QuotaLimits(**free), Amounts(**borrowed)
