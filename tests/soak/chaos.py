"""Continuous faults: killed controllers, API server restarts and broken watches."""

import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import httpx

from integration.controller_process import ControllerProcess
from integration.fault_proxy import FaultProxy
from integration.replicas import Replicas
from soak.memory import EVERY, Sample, sample
from torchrun_cluster import LocalCluster

KILL_SECONDS = 20.0
RESTART_SECONDS = 60.0
CUT_SECONDS = 5.0  # on average
CUT_SHARE = 0.3  # share of the open watches, each time
LEADERS = 0.8  # share of the kills; the others hit a standby


class Chaos:
    """Kills `replicas` but never `survivor`. All their watches go through `proxy`."""

    def __init__(
        self,
        cluster: LocalCluster,
        replicas: Replicas,
        survivor: ControllerProcess,
        proxy: FaultProxy,
        chance: random.Random,
    ) -> None:
        self.done: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.samples: list[Sample] = []
        self.began = time.monotonic()
        self._cluster, self._replicas = cluster, replicas
        self._survivor, self._proxy, self._chance = survivor, proxy, chance
        self._over = threading.Event()

    @contextmanager
    def going_on(self) -> Iterator["Chaos"]:
        """Inject faults and sample memory until the end of the block."""
        self.began = time.monotonic()
        threads = [
            threading.Thread(target=self._again, args=each)
            for each in (
                (lambda: KILL_SECONDS, self._kill),
                (lambda: RESTART_SECONDS, self._restart),
                (lambda: self._chance.expovariate(1 / CUT_SECONDS), self._cut),
                (lambda: EVERY, self._look),
            )
        ]
        for thread in threads:
            thread.start()
        try:
            yield self
        finally:
            self._over.set()
            for thread in threads:
                thread.join()

    def _again(self, pause: Callable[[], float], act: Callable[[], None]) -> None:
        due = time.monotonic() + pause()
        while not self._over.wait(max(0.0, due - time.monotonic())):
            try:
                act()
            except Exception as error:  # the soak test continues, and reports it at the end
                self.wrong.append(f"{act.__name__} failed: {error!r}")
            due += pause()

    def _kill(self) -> None:
        victim = self._chance.choice(self._replicas.all)
        with suppress(httpx.HTTPError):
            leading = [each for each in self._replicas.all if self._leads(each)]
            if leading and self._chance.random() < LEADERS:
                victim = leading[0]
                self.done["kills of the leader"] += 1
        victim.kill()
        self.done["kills"] += 1

    def _leads(self, replica: ControllerProcess) -> bool:
        identities = [line["identity"] for line in replica.lines() if line["message"] == "serving"]
        return identities[-1:] == [self._replicas.holder]

    def _restart(self) -> None:
        if self._chance.random() < 0.3:
            self._cluster.compact_etcd()
            self.done["compactions"] += 1
        end = self._chance.choice((self._cluster.stop, self._cluster.kill))
        end("kube-apiserver")
        self._cluster.start("kube-apiserver")
        self.done[f"restarts of the API server by {end.__name__}"] += 1
        # Otherwise its watches would be down for a minute longer, which is most of the time.
        self._cluster.kill("kube-controller-manager")
        self._cluster.start("kube-controller-manager")
        if not self._cluster.is_running("etcd"):
            raise RuntimeError("etcd has ended")

    def _cut(self) -> None:
        self._proxy.cut_watches(self._chance, CUT_SHARE)

    def _look(self) -> None:
        if not self._survivor.is_running():
            code = self._survivor.wait()
            self.wrong.append(f"the controller that nobody kills ended by itself: {code}")
            self._survivor.start()
        with suppress(ProcessLookupError, FileNotFoundError):
            self.samples.append(sample(self._survivor.pid, self.began))
