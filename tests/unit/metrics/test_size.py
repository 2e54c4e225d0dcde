"""The size and time of /metrics with 10,000 jobs of hostile users."""

import random
import time
from collections.abc import Callable
from typing import get_args

from msgspec.structs import replace

from metrics_world import World, job, node, queue
from torchrun_api.kinds.admission import Quota
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.meta import Condition
from torchrun_api.kinds.queue import TorchrunQueueSpec, TorchrunQueueStatus
from torchrun_api.kinds.status import UNFINISHED, Attempt, Phase, Progress, WorkersStatus
from torchrun_controller.cache.store import Change
from torchrun_controller.metrics.changes import record_status
from torchrun_controller.metrics.jobs import MAX_WAITS
from torchrun_controller.metrics.labels import MAX_QUEUES
from torchrun_controller.metrics.observers import QueueObserver, watch_queue
from torchrun_controller.metrics.per_job import MAX_JOBS, PerJobMetrics
from torchrun_controller.reconcile.admission.model import Amounts, QueueSummary, RoundRobinState
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.workqueue import WorkQueue

JOBS = 10_000
NAMESPACES = 3000
LIMIT = 1_000_000  # bytes
OPENMETRICS = "application/openmetrics-text; version=1.0.0"
PHASES = get_args(Phase)


class Crowded(World):
    """Names of the maximum length, and more queues, reasons and jobs than have series."""

    def __init__(self) -> None:
        super().__init__()
        self.random = random.Random(1)
        self.nodes = [node(f"n{number}", "8") for number in range(1000)]
        self.each = PerJobMetrics(
            MAX_JOBS,
            leads=lambda: True,
            get=lambda namespace, name: self.jobs[namespace, name],
            progress=lambda key: Progress(step=10**9, loss=1 / 3, samples_per_second=1e9 / 7),
        )
        self.metrics.register(self.each)
        self.jobs: dict[tuple[str, str], TorchrunJob] = {}
        self._fill_queues()
        self._fill_jobs()
        self._fill_rest()

    def _fill_queues(self) -> None:
        not_ready = Condition(type="Ready", status="False", reason="R" * 40)
        summaries = []
        for number in range(NAMESPACES):
            made = replace(
                queue(f"{number:q>63}" + "q" * 190, self.namespace(number)),
                spec=TorchrunQueueSpec(quota=Quota(gpus=1_000_000)),
                status=TorchrunQueueStatus(conditions=(not_ready,)),
            )
            self.put(made)
            meta, used = made.metadata, Amounts(gpus=1_000_000)
            summary = QueueSummary(
                namespace=meta.namespace,
                name=meta.name,
                round_robin=RoundRobinState(weight=1),
                used=used,
            )
            summaries.append(summary)
        self.census.set_admission(tuple(summaries))

    def _fill_jobs(self) -> None:
        for number in range(JOBS):
            # Most jobs are in queues with their own series, and have many reasons to wait.
            own = number % (MAX_QUEUES + 50)
            made = job(
                f"{number:j>45}",
                PHASES[(number // (MAX_QUEUES + 50)) % len(PHASES)],
                queue=f"{own:q>63}" + "q" * 190,
                namespace=self.namespace(own),
                reason=f"{self.random.randrange(70):R>40}",
                gpus=1024,
                since=number,
                unfenced=3,
            )
            status = replace(
                made.status,
                num_nodes=128,
                workers=WorkersStatus(running=128),
                progress=Progress(
                    step=10**9, total_steps=10**9, loss=1 / 3, samples_per_second=1e6 / 3
                ),
            )
            made = replace(made, status=status)
            self.put(made)
            self.jobs[made.metadata.namespace, made.metadata.name] = made
        for made in self.jobs.values():
            self.each.job_changed(Change(None, made), True)

    def _fill_rest(self) -> None:
        for number, made in enumerate(self.jobs.values()):
            end = Attempt(number=99, counted=number % 3 == 0, reason=f"{'Q' * 37}{number % 100:03}")
            if number % 3 == 1:
                end = replace(end, reason="Resizing")
            after = replace(made.status, phase=PHASES[number % 9], attempts=(end,))
            record_status(self.metrics, Observed(job=made), after, made.metadata.creation_timestamp)
        for resource in (f"{number:r>40}" for number in range(20)):
            for verb in ("list", "watch", "patch", "delete"):
                for code in (0, 200, 403, 409, 429, 503):
                    self.metrics.observe_request(verb, resource, code, self.random.random() * 9)
            for result in ("Written", "Gone", "Rejected", "Superseded", "NameConflict"):
                self.metrics.applies.labels(resource, result).inc()
            for cause in ("Expired", "Broken", "Unreached", "Refused"):
                self.metrics.watch_restarts.labels(resource, cause).inc()
            self.metrics.watch_age(resource, lambda: 1 / 3)
        for controller in ("job", "queue", "admission"):
            QueueObserver(self.metrics, controller)
            watch_queue(self.metrics, controller, WorkQueue(time.monotonic))
            self.metrics.reconciles.labels(controller, "Postponed").inc()
            for outcome in ("Done", "RequeueAfter", "Behind", "Retry", "Terminal"):
                self.metrics.reconciles.labels(controller, outcome).inc()
                self.metrics.reconcile_seconds.labels(controller, outcome).observe(1 / 3)

    @staticmethod
    def namespace(number: int) -> str:
        return f"{number:n>63}"


def test_it_stays_under_a_megabyte_with_hostile_names() -> None:
    world = Crowded()
    for accept in ("", OPENMETRICS):
        body = world.metrics.snapshot().render(accept)[0]
        assert len(body) < LIMIT, f"{len(body)} bytes as {accept or 'text'}"
    # The largest families are present.
    assert body.count(b"torchrun_queue_jobs{") == (MAX_QUEUES + 1) * len(UNFINISHED)
    assert body.count(b"torchrun_job_step{") == MAX_JOBS
    assert body.count(b"torchrun_queue_waiting_jobs{") >= MAX_WAITS


def test_a_scrape_blocks_the_event_loop_for_a_few_loops_over_all_jobs() -> None:
    """A ratio of CPU times, because machines differ and are busy: 50 ms are about 60 such loops."""
    world = Crowded()

    def once(what: Callable[[], object]) -> float:
        began = time.thread_time()
        what()
        return time.thread_time() - began

    def plain() -> int:
        return sum(len(made.metadata.name + made.spec.job_queue) for made in world.jobs.values())

    # In pairs, because the speed of a busy machine changes meanwhile.
    pairs = [(once(plain), once(world.metrics.snapshot)) for _ in range(9)]
    loop, snapshot = min(pairs, key=lambda pair: pair[1] / pair[0])
    rendered = once(lambda: world.metrics.snapshot().render(""))
    print(f"a loop {loop * 1e3:.2f} ms, a snapshot {snapshot * 1e3:.1f} ms", end=", ")
    print(f"{rendered * 1e3:.1f} ms with rendering, which a thread does")
    assert snapshot < 60 * loop, f"{snapshot / loop:.0f} times a loop over all jobs"
