"""Jobs arrive for an hour while controllers are killed, the API server restarts and watches break.

    python -m soak --minutes 60

with `tests`, `cluster` and `bench` on the path, or `make soak MINUTES=60`. Two namespaces on one
real API server have the same users. In one, the controller's two replicas are killed, one every 20
s. In the other the same controller lives through everything else, and its memory is sampled: 40 s
of a process would show no trend. verdict.py has the invariants.
"""

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from integration.audit import AuditLog, Write, count_creations, without_lease
from integration.controller_process import Api, ControllerProcess, install_crds
from integration.fault_proxy import FaultProxy
from integration.replicas import Replicas, lasting
from integration.team import Team
from soak import memory
from soak.chaos import Chaos
from soak.lives import NARROW, Life
from soak.verdict import Verdict
from torchrun_api import names
from torchrun_bench.report import machine, say
from torchrun_cluster import LocalCluster, Size

NODES = 6  # admission counts their capacity, but no pod is bound to them
TELL = 30.0  # seconds between two lines of progress
PATIENCE = 300.0  # seconds for the last jobs after the end of all faults
BRIEF = lasting(
    "6s", "4s", "1s"
)  # with the default of 15 s there would be no leader for most of 20 s
PATIENT = lasting("120s", "90s", "2s")  # a restart of the API server must not cost the lease
SURVIVOR = "survivor"


class Soak:
    """One soak test."""

    def __init__(self, minutes: float, seed: int, pause: float, folder: Path) -> None:
        self._minutes, self._folder, self._pause = minutes, folder, pause
        self._chance = random.Random(seed)
        self._audit = AuditLog(folder)
        self._reported: set[str] = set()

    def run(self) -> dict[str, Any]:
        """Run it. Returns the result."""
        # Its log would be rotated at 100 MB.
        extra = {
            "kube-apiserver": [*self._audit.flags, "--audit-log-maxsize=10000"],
            # Nodes without a kubelet keep their initial Ready condition.
            "kube-controller-manager": ["--controllers=*,-node-lifecycle-controller"],
        }
        name = f"soak-{os.getpid()}"
        with ExitStack() as stack:
            cluster = LocalCluster(name=name, size=Size.CONTROL_PLANE, extra_args=extra)
            stack.enter_context(cluster)
            install_crds(cluster)
            api = Api(cluster)
            stack.callback(api.close)
            for number in range(NODES):
                _node(api, f"node-{number}")
            return self._with(cluster, api)

    def _with(self, cluster: LocalCluster, api: Api) -> dict[str, Any]:
        proxy = FaultProxy(cluster, self._folder)
        teams = [Team(api), Team(api)]
        for team in teams:
            team.make_queue()
            team.make_queue("narrow", quota={"jobs": NARROW})
        lives = [Life(team, random.Random(self._chance.random()), self._pause) for team in teams]
        verdicts = [Verdict(api.client, team.name) for team in teams]
        replicas = Replicas(cluster, teams[0], self._folder, 2, *BRIEF)
        own = ("--namespace", teams[1].name, "--lease-namespace", teams[1].name)
        survivor = self._survivor(cluster, *own, "--lease-name", SURVIVOR, *PATIENT)
        chaos = Chaos(cluster, replicas, survivor, proxy, self._chance)
        with ExitStack() as stack:
            stack.enter_context(proxy.running())
            for process in (*replicas.all, survivor):
                process.through(proxy.kubeconfig)
            for each in verdicts:
                stack.enter_context(each.watching())
            stack.enter_context(replicas.running_with_restarts())
            stack.enter_context(survivor.running())
            for life in lives:
                stack.enter_context(life.going_on())
            with chaos.going_on():
                self._follow(chaos, lives, verdicts)
                for life in lives:
                    life.arrivals.clear()
            lost = self._finish(chaos, lives, verdicts)
            left = self._left(api, teams)
            watched = _wrong(chaos, lives, verdicts)
        writes = self._audit.writes()
        wrong = [*watched, *left, *_of_writes(writes)]
        return self._result(chaos, lives, verdicts, proxy, lost, wrong, writes)

    def _survivor(self, cluster: LocalCluster, *arguments: str) -> ControllerProcess:
        (self._folder / SURVIVOR).mkdir()
        return ControllerProcess(cluster, self._folder / SURVIVOR, *arguments)

    def _follow(self, chaos: Chaos, lives: list[Life], verdicts: list[Verdict]) -> None:
        end = chaos.began + 60 * self._minutes
        while (left := end - time.monotonic()) > 0:
            time.sleep(min(TELL, left))
            self._progress(chaos, lives, verdicts)

    def _progress(self, chaos: Chaos, lives: list[Life], verdicts: list[Verdict]) -> None:
        minutes = (time.monotonic() - chaos.began) / 60
        came, done = (sum(map(len, each)) for each in (_came(lives), _done(lives)))
        oldest = max((age for life in lives for age in life.under_way().values()), default=0.0)
        wrong = _wrong(chaos, lives, verdicts)
        for each in wrong:
            if each not in self._reported:
                self._reported.add(each)
                say(f"WRONG: {each}")
        rss = f"{chaos.samples[-1].mib:.1f}" if chaos.samples else "?"
        say(
            f"{minutes:.1f} of {self._minutes:g} min: {came} jobs came, {done} are done, the oldest of"
            f" the rest is {oldest:.0f} s old; {chaos.done['kills']} kills, {_restarts(chaos)}"
            f" restarts of the API server; RSS {rss} MiB; {len(wrong)} wrong"
        )

    def _finish(self, chaos: Chaos, lives: list[Life], verdicts: list[Verdict]) -> list[str]:
        """Wait for the last jobs. Returns those that never end."""
        end = time.monotonic() + PATIENCE
        while any(life.under_way() for life in lives) and time.monotonic() < end:
            time.sleep(2.0)
        self._progress(chaos, lives, verdicts)
        return [f"{life.team.name}/{name}" for life in lives for name in life.under_way()]

    def _left(self, api: Api, teams: list[Team]) -> list[str]:
        """Objects of deleted jobs that still exist."""

        def look() -> list[str]:
            selector = f"{names.MANAGED_BY_LABEL}={names.MANAGED_BY}"
            return [
                f"{item['metadata']['name']} of {root} is left behind"
                for team in teams
                for root in (f"{team.batch}/jobs", f"{team.core}/pods", f"{team.core}/services")
                for item in api.items(root, selector)
            ]

        end = time.monotonic() + 60
        while (left := look()) and time.monotonic() < end:
            time.sleep(1.0)
        return left

    def _result(
        self,
        chaos: Chaos,
        lives: list[Life],
        verdicts: list[Verdict],
        proxy: FaultProxy,
        lost: list[str],
        wrong: list[str],
        writes: list[Write],
    ) -> dict[str, Any]:
        judged = 60 * self._minutes >= memory.LEAST
        trend = memory.trend(chaos.samples) if judged else None
        duplicate = [each for each in wrong if " Jobs" in each]
        return {
            "minutes": self._minutes,
            "jobs": sum(map(len, _came(lives))),
            "ended": sum(map(len, _done(lives))),
            "child_jobs": sum(each.gangs for each in verdicts),
            "faults": {**chaos.done, "watches cut": proxy.cut},
            "controllers_that_wrote": len({w.who for w in writes}),
            "writes": len(writes),
            "lost": lost,
            "duplicate": duplicate,
            "wrong": wrong,
            "rss_trend": trend and trend.as_dict(),
            "rss_mib": [
                round(s.mib, 1) for s in chaos.samples[:: max(1, len(chaos.samples) // 60)]
            ],
            "open_files": [s.files for s in chaos.samples[:: max(1, len(chaos.samples) // 60)]],
            "log": _logged(self._folder),
            "passed": not lost and not wrong and (trend is None or trend.is_flat),
        }


def _node(api: Api, name: str) -> None:
    api.create("/api/v1/nodes", {"metadata": {"name": name}})
    room = {"cpu": "64", "memory": "512Gi", "pods": "110"}
    ready = {"type": "Ready", "status": "True"}
    status = {"allocatable": room, "capacity": room, "conditions": [ready]}
    api.patch(f"/api/v1/nodes/{name}/status", {"status": status})
    api.patch(f"/api/v1/nodes/{name}", {"spec": {"taints": None}})  # it is created as not ready


def _wrong(chaos: Chaos, lives: list[Life], verdicts: list[Verdict]) -> list[str]:
    of_lives = [wrong for life in lives for wrong in life.wrong]
    of_verdicts = [wrong for verdict in verdicts for wrong in verdict.wrong]
    return [*of_lives, *of_verdicts, *chaos.wrong]


def _came(lives: list[Life]) -> list[dict[str, Any]]:
    return [life.scripts for life in lives]


def _done(lives: list[Life]) -> list[dict[str, Any]]:
    return [life.done for life in lives]


def _restarts(chaos: Chaos) -> int:
    return sum(n for what, n in chaos.done.items() if what.startswith("restarts"))


def _of_writes(writes: list[Write]) -> list[str]:
    """From the API server's audit log: Jobs created twice, and writes without the lease."""
    led: dict[str, str] = {w.who: w.name for w in writes if w.takes_lease}
    problems = []
    for lease in set(led.values()):
        ours = [w for w in writes if led.get(w.who) == lease]
        problems += [
            f"{name} was made as {n} Jobs"
            for name, n in count_creations(ours, "jobs").items()
            if n > 1
        ]
        problems += [f"{w.who} wrote {w.name} without the lease" for w in without_lease(ours)]
    others = [w for w in writes if w.who not in led and w.resource != "leases" and w.code < 400]
    return problems + [f"{w.who} wrote {w.name}, and never had the lease" for w in others]


def _logged(folder: Path) -> dict[str, int]:
    """Log lines of all controllers above level info, counted by message."""
    messages: Counter[str] = Counter()
    for log in folder.glob("*/controller.log"):
        for text in log.read_text().splitlines():
            if text.startswith("{"):
                try:
                    line = json.loads(text)
                except ValueError:  # killed during a write
                    continue
                if line.get("level") not in ("info", "debug"):
                    messages[f"{line.get('level')}: {line.get('message')}"] += 1
            else:
                messages[f"no JSON: {text[:80]}"] += 1
    return dict(messages.most_common(40))


def _interrupted(number: int, _: object) -> None:
    raise SystemExit(f"ended by signal {number}")


def main() -> int:
    """Run it. The exit code is 0 without violations."""
    parser = argparse.ArgumentParser("python -m soak", description=__doc__)
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--seed", type=int, default=random.randrange(2**32))
    parser.add_argument(
        "--pause", type=float, default=2.0, help="seconds between two jobs of a namespace"
    )
    options = parser.parse_args()
    for number in (signal.SIGINT, signal.SIGTERM):  # background jobs of a shell ignore SIGINT
        signal.signal(number, _interrupted)
    say(f"seed {options.seed}, {machine()}")
    with tempfile.TemporaryDirectory(prefix="soak-") as folder:
        soak = Soak(options.minutes, options.seed, options.pause, Path(folder))
        result = soak.run()
    for what, value in result.items():
        print(f"{what:28} {value}")
    return 0 if result["passed"] else 1


if __name__ == "__main__":
    sys.exit(main())
