"""Records docs/recordings/dashboards.json, what the dashboards show of a run: `make pictures`.

pytest collects this file by its name only. Two controllers run against a real API server with
simulated nodes; a real Prometheus scrapes them and answers the queries of all panels.
"""

import json
import math
import re
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from integration.controller_process import Api
from integration.team import WORKSPACE, Team
from integration.test_progress import Reporter, token
from monitoring.conftest import ROOT, Controllers
from monitoring.server import Prometheus

RECORDING = ROOT / "docs" / "recordings" / "dashboards.json"
BOARDS = ROOT / "manifests" / "monitoring" / "grafana"
SECONDS = 210
POINTS = 85
NAMESPACE, JOB = "vision", "gpt"
ENDS_WELL = {"labels": {"ends": "well"}}
ENDS_BADLY = {"labels": {"ends": "badly"}}
REPORT_SECONDS = 2
PHASES = {  # at the end
    JOB: "Running",
    "detector": "Succeeded",
    "llm": "Running",
    "baseline": "Pending",
    "upload": "Queued",
    "sweep-40": "Failed",
    "eval-6": "Succeeded",
}
STEPS = 2000  # of the job; the run reaches only some
WIDTH = "15s"  # of Grafana's $__rate_interval, for a scrape each second

pytestmark = pytest.mark.timeout(SECONDS + 300)


class Run:
    """The jobs of a team, by the seconds since the start of the run."""

    def __init__(self, team: Team, reporter: Reporter) -> None:
        self._team = team
        self._reporter = reporter
        self._tokens: dict[str, str] = {}
        self._step = 0

    def play(self) -> None:
        """Do everything in its time."""
        start = time.monotonic()
        for seconds, act in sorted(self._script(), key=lambda entry: entry[0]):
            time.sleep(max(start + seconds - time.monotonic(), 0))
            act()

    def _script(self) -> Iterator[tuple[float, Callable[[], object]]]:
        yield 0, self._submit(JOB, "pretraining", 2)
        yield 12, self._submit("detector", "pretraining", 1)
        yield 30, self._submit("llm", "pretraining", 1)
        yield 36, self._submit("upload", "evals", 1, volumes=WORKSPACE)
        yield 48, self._submit("baseline", "research", 1)
        yield 96, lambda: self._succeed("detector")
        yield 80, self._receive_upload
        for at in range(6, SECONDS - 10, 14):
            yield at, self._submit(f"eval-{at}", "evals", 1, **ENDS_WELL)
        for at in range(40, SECONDS - 40, 35):
            policy = {"reliability": {"maxRestarts": 1}}
            yield at, self._submit(f"sweep-{at}", "evals", 1, **policy, **ENDS_BADLY)
        for at in range(4, SECONDS, REPORT_SECONDS):
            yield at, self._report
        yield SECONDS, lambda: None

    def _submit(self, name: str, queue: str, nodes: int, **spec: object) -> Callable[[], object]:
        return lambda: self._team.submit(name, jobQueue=queue, numNodes=nodes, **spec)

    def _succeed(self, job: str) -> None:
        for pod in self._team.workers(job, 1):
            self._team.pod_becomes(pod, "Succeeded")

    def _receive_upload(self) -> None:
        message = json.dumps({"revision": 1, "sha256": "0" * 64, "bytes": 48_000_000})
        self._team.pod_becomes("upload-sync-0", "Succeeded", message)

    def _first_pod(self) -> dict[str, Any]:
        """The pod of rank 0 once it is on a node, else an empty object."""
        pods = self._team.newest_gangs()[JOB][1]
        index = "batch.kubernetes.io/job-completion-index"
        on_node = (pod for pod in pods if pod["spec"].get("nodeName"))
        return next((pod for pod in on_node if pod["metadata"]["labels"][index] == "0"), {})

    def _report(self) -> None:
        """Send the progress of the job while its pods run, as the launcher does."""
        if self._team.status(JOB).get("phase") != "Running":
            return
        first = self._first_pod()
        if not first:
            return
        pod = first["metadata"]["name"]
        if pod not in self._tokens:
            self._tokens[pod] = token(self._team, pod)
        self._step += 11
        wave = math.sin(self._step / 40)
        self._reporter.send(
            self._tokens[pod],
            step=self._step,
            totalSteps=STEPS,
            loss=round(2.1 + 8.4 * math.exp(-self._step / 260) + 0.05 * wave, 3),
            samplesPerSecond=round(704 + 9 * wave, 1),
        )


def test_recording(controllers: Controllers, prometheus: Prometheus, api: Api) -> None:
    team = Team(api, NAMESPACE)
    team.make_queue("pretraining", nodeResources={"cpus": 1, "gpus": 8}, quota={"gpus": 24})
    team.make_queue("evals", nodeResources={"cpus": 1, "gpus": 2})
    progress = ("--progress-url", "http://controller.test:8081", "--progress-port", "0")
    flags = ("--metrics-jobs", "20", *progress)
    with (
        controllers.running("torchrun-controller-0", *flags) as first,
        controllers.running("torchrun-controller-1", *flags),
    ):
        first.wait_for_line("controllers started")
        start = time.time()
        Run(team, Reporter(first)).play()
        end = time.time()
        names = ("operator", "team", "job")
        boards = [board(prometheus, name, start, end) for name in names]
        RECORDING.write_text(json.dumps(boards, separators=(",", ":")).replace("},", "},\n") + "\n")
        phases = {name: team.status(name).get("phase") for name in PHASES}
        assert phases == PHASES


def board(prometheus: Prometheus, name: str, start: float, end: float) -> dict[str, Any]:
    """A dashboard with the answers to its queries, as docs/draw_dashboards.py reads it."""
    source = json.loads((BOARDS / f"torchrun-{name}.json").read_text())
    variables = {
        "__rate_interval": WIDTH,
        "__range": f"{round(end - start)}s",
        "namespace": NAMESPACE,
        "queue": ".*",
        "torchrun_job": JOB,
    }
    panels = []
    for panel in source["panels"]:
        series = []
        for target in panel.get("targets", ()):
            expr = re.sub(r"\$(\w+)", lambda match: variables[match[1]], target["expr"])
            begin, points = (end - 1, 2) if target["instant"] else (start, POINTS)
            for labels, values in prometheus.series(expr, begin, end, points):
                series.append(recorded(target["legendFormat"], labels, values))
        panels.append(layout(panel) | {"series": sorted(series, key=lambda one: one["legend"])})
    return {"name": name, "title": source["title"], "seconds": round(end - start), "panels": panels}


def recorded(legend: str, labels: dict[str, str], values: list[float | None]) -> dict[str, Any]:
    """A series with the text of its legend, and with four digits of each value."""
    legend = "" if legend == "__auto" else legend
    return {
        "legend": re.sub(r"{{(\w+)}}", lambda match: labels.get(match[1], ""), legend),
        "labels": {name: value for name, value in labels.items() if name != "__name__"},
        "points": [None if value is None else float(f"{value:.4g}") for value in values],
    }


def layout(panel: dict[str, Any]) -> dict[str, Any]:
    """What the picture needs of a panel."""
    defaults = panel.get("fieldConfig", {}).get("defaults", {})
    steps = defaults.get("thresholds", {}).get("steps", [])
    bound = steps[1]["value"] if len(steps) > 1 else None
    below = bool(steps) and steps[0]["color"] == "red"
    return {
        "title": panel["title"],
        "kind": panel["type"],
        "unit": defaults.get("unit", "short"),
        "place": panel["gridPos"],
        "stacked": defaults.get("custom", {}).get("stacking", {}).get("mode") == "normal",
        "red_above": None if below else bound,
        "red_below": bound if below else None,
    }
