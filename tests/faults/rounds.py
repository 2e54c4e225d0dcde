"""Simulated launchers of gangs whose single pods are replaced: they start and stop rounds together.

As docs/decisions/0011-replacement-of-single-pods.md has it: a lost pod stops the ranks of the
others, which wait. A round starts once every node has a pod that may start its ranks.
"""

import asyncio
import json
from collections.abc import Callable
from typing import Any

from bodies import Body
from faults.cluster import index_of, owners
from gates import failures_before
from torchrun_api import contract

# What a launcher writes whose gang has ended.
PEER_FAILED = json.dumps({"exitCode": 143, "reason": "PeerFailed", "message": "A pod is gone."})


class Round:
    """A round of a gang. members: UIDs of its pods. timers: the ends of their ranks."""

    def __init__(self, number: int, members: frozenset[str]) -> None:
        self.number = number
        self.members = members
        self.timers: list[asyncio.TimerHandle] = []
        self.is_running = True

    def stop(self) -> None:
        """The ranks stop before their end."""
        self.is_running = False
        for timer in self.timers:
            timer.cancel()


class Rounds:
    """The rounds of all gangs, by the UID of their Job.

    start: starts the ranks of a pod and returns the timer of their end. stop: its ranks have
    stopped. give_up: the launcher of a pod ends.
    """

    def __init__(
        self,
        start: Callable[[Body], asyncio.TimerHandle | None],
        stop: Callable[[Body], None],
        give_up: Callable[[Body], None],
    ) -> None:
        self._start = start
        self._stop = stop
        self._give_up = give_up
        self._rounds: dict[str, Round] = {}

    def runs(self, pod: Body) -> bool:
        """Whether the pod is in a round that runs."""
        latest = self._rounds.get(_gang(pod))
        return latest is not None and latest.is_running and _uid(pod) in latest.members

    def look(self, pods: list[Body], size: int, may_run: Callable[[Body], bool]) -> None:
        """Start or stop the round of a gang. pods: the newest of each node. size: their number.

        may_run: whether the pod is reached, and may run ranks as far as its gate is concerned.
        """
        latest = self._rounds.get(_gang(pods[0]))
        members = frozenset(map(_uid, pods))
        is_whole = len(pods) == size and all(may_run(pod) or has_succeeded(pod) for pod in pods)
        if latest is not None and latest.is_running and latest.members == members and is_whole:
            return
        if latest is not None and latest.is_running:
            latest.stop()
            seconds = min(map(replace_seconds, pods))
            asyncio.get_running_loop().call_later(seconds, self._end, latest, pods)
        for pod in filter(may_run, pods):
            self._stop(pod)
        if is_whole and not any(map(has_succeeded, pods)):
            started = Round(latest.number + 1 if latest is not None else 0, members)
            self._rounds[_gang(pods[0])] = started
            timers = [self._start(pod) for pod in pods]
            started.timers = [timer for timer in timers if timer is not None]

    def _end(self, stopped: Round, pods: list[Body]) -> None:
        """End the launchers that have waited too long for a new pod."""
        if self._rounds[_gang(pods[0])] is stopped:
            for pod in pods:
                self._give_up(pod)


def newest_of_nodes(pods: list[Body]) -> list[Body]:
    """The newest pod of each node of a gang."""
    return list({index_of(pod): pod for pod in sorted(pods, key=failures_before)}.values())


def is_replaced(pod: Body, pods: list[Body]) -> bool:
    """Whether a newer pod of the same Job and node exists."""
    return any(
        owners(other) == owners(pod)
        and index_of(other) == index_of(pod)
        and failures_before(other) > failures_before(pod)
        for other in pods
    )


def replace_seconds(pod: Body) -> float:
    """How long the launcher waits for the replacement of another pod; 0: not at all."""
    for container in pod["spec"]["containers"]:
        for variable in container.get("env", ()):
            if variable["name"] == contract.IN_PLACE_RESTARTS.name and variable.get("value"):
                limits: dict[str, Any] = json.loads(variable["value"])
                return float(limits.get("replaceSeconds", 0.0))
    return 0.0


def has_succeeded(pod: Body) -> bool:
    phase: str = pod["status"]["phase"]
    return phase == "Succeeded"


def _uid(pod: Body) -> str:
    uid: str = pod["metadata"]["uid"]
    return uid


def _gang(pod: Body) -> str:
    (job,) = owners(pod)
    return job
