"""What queues use of their own quota and of what their cohort lends: counters of one decision.

Within a cohort the quotas of the members that limit a thing are added up; a member that does not
limit it neither lends nor borrows it. A queue without a cohort is one of its own.
"""

from collections.abc import Iterator

from torchrun_controller.reconcile.admission.state import Amounts, Limits, Request

KINDS = ("nodes", "gpus", "cpu", "memory", "jobs")
Need = tuple[int, int, int, int, int]


def need_of(request: Request, pods: int, jobs: int = 1) -> Need:
    """What so many pods of a request count for, in the order of KINDS.

    With `jobs` 0 they are more pods of a job that is counted already.
    """
    head = request.head if jobs else None
    alike = pods if head is None else pods - 1
    cpu, memory = (
        request.pod.get(name, 0) * alike + (0 if head is None else head.get(name, 0))
        for name in ("cpu", "memory")
    )
    gpus = request.gpus * alike + (0 if head is None else request.head_gpus)
    return pods, gpus, cpu, memory, jobs


def cost_of(need: Need) -> int:
    """What a turn is charged: GPUs, and nodes where there are none."""
    return need[1] or need[0]


class Cohort:
    """The quotas of all members and what they use of them, by kind."""

    def __init__(self) -> None:
        self.limit = [0] * len(KINDS)
        self.used = [0] * len(KINDS)


class Account:
    """What one queue uses, may use by its own right, and may use at all."""

    def __init__(self, limits: Limits, cohort: Cohort) -> None:
        own = ((kind, getattr(limits, name)) for kind, name in enumerate(KINDS))
        self.limits: dict[int, int] = {kind: limit for kind, limit in own if limit is not None}
        self.used = [0] * len(KINDS)
        self.cohort = cohort
        for kind, limit in self.limits.items():
            cohort.limit[kind] += limit

    def take(self, need: Need, times: int = 1) -> None:
        """Count it as used; with `times` -1 no longer."""
        for kind, amount in enumerate(need):
            self.used[kind] += amount * times
        for kind in self.limits:
            self.cohort.used[kind] += need[kind] * times

    def lacks(self, need: Need) -> int | None:
        """The first kind of which too little is left, borrowed or not."""
        cohort = self.cohort
        for kind in self.limits:
            if need[kind] and cohort.used[kind] + need[kind] > cohort.limit[kind]:
                return kind
        return None

    def exceeds(self, need: Need) -> int | None:
        """The first kind of which there is never enough, even with nothing in use."""
        return next((kind for kind in self.limits if need[kind] > self.cohort.limit[kind]), None)

    def borrows(self, need: Need) -> bool:
        """Whether it is more than what is left of the queue's own quota."""
        return any(
            need[kind] and self.used[kind] + need[kind] > limit
            for kind, limit in self.limits.items()
        )

    def beyond(self) -> Iterator[tuple[int, int]]:
        """The kinds of which more is used than the own quota, and how much more."""
        for kind, limit in self.limits.items():
            if self.used[kind] > limit:
                yield kind, self.used[kind] - limit

    def free(self) -> Limits:
        """What the own quota still has."""
        left = {kind: max(0, limit - self.used[kind]) for kind, limit in self.limits.items()}
        return Limits(**{KINDS[kind]: amount for kind, amount in left.items()})


def amounts(values: dict[int, int]) -> Amounts:
    """Amounts from values by kind."""
    return Amounts(**{KINDS[kind]: value for kind, value in values.items()})
