"""Simulated launchers of node 0: they restart ranks in place, and report it to the controller.

They report until their pod ends, because a controller may lose what it has accepted. The report is
stored as by the endpoint of the controller, without HTTP and tokens.
"""

import asyncio
from collections.abc import Callable
from datetime import datetime

from bodies import Body
from faults.cluster import PODS, index_of, is_over
from faults.replica import Process
from faults.store import Store, key_of
from torchrun_api import names
from torchrun_controller.reconcile.model.observed import FailedRound, RestartsInPlace

REPEAT = 10.0  # seconds between two reports, as in launch.reporting
LAST_ROUNDS = 3


class Launchers:
    """The launchers of all gangs. `leader` returns the controller that leads, if there is one."""

    def __init__(
        self, store: Store, now: Callable[[], datetime], leader: Callable[[], Process | None]
    ) -> None:
        self._store = store
        self._now = now
        self._leader = leader
        # By the UID of the pod of node 0. A launcher reads once what an earlier one left.
        self._rounds: dict[str, list[FailedRound]] = {}
        self._predecessors: dict[str, tuple[int, int]] = {}

    def restart_in_place(self, workers: list[Body], node: int) -> None:
        """A rank on this node fails, and all ranks start again in the same pods."""
        leader = next(pod for pod in workers if index_of(pod) == "0")
        uid = leader["metadata"]["uid"]
        rounds = self._rounds.setdefault(uid, [])
        _, first_round = self._predecessors.setdefault(uid, _predecessor(leader))
        rounds.append(
            FailedRound(
                round=first_round + len(rounds),
                node=node,
                seconds=5.0,
                rank=node,
                exit_code=1,
                reason="Exception",
                message="KeyError: 'x'",
                time=self._now(),
            )
        )
        if len(rounds) == 1:
            self._report(uid)

    def _report(self, uid: str) -> None:
        pod = next((pod for pod in self._store.bodies(PODS) if pod["metadata"]["uid"] == uid), None)
        if pod is None or is_over(pod):
            return
        asyncio.get_running_loop().call_later(REPEAT, self._report, uid)
        process = self._leader()
        if process is None:
            return
        components, rounds = process.components, self._rounds[uid]
        worker = components.factory.worker(*key_of(pod), uid)
        if worker is not None and worker.is_current:
            count = self._predecessors[uid][0] + len(rounds)
            restarts = RestartsInPlace(count=count, last=tuple(rounds[-LAST_ROUNDS:]))
            components.factory.reports.put_restarts(worker.job, worker.child_uid, restarts)
            components.queues["job"].add(worker.job)


def _predecessor(leader: Body) -> tuple[int, int]:
    """The restarts in place before this pod of node 0, and the number of its first round."""
    value: str = leader["metadata"].get("annotations", {}).get(names.IN_PLACE, "0 0")
    restarts, first_round = value.split()
    return int(restarts), int(first_round)
