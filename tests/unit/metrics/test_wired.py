from msgspec.structs import replace

from metrics_world import job
from torchrun_api.kinds.resources import KAI_QUEUES, TORCHRUN_JOBS
from torchrun_api.kinds.status import Progress
from torchrun_controller.client import Transport
from torchrun_controller.clock import SYSTEM
from torchrun_controller.leader import NoElection
from torchrun_controller.manager import Components, Sessions, assemble
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.reconcile.model.observed import Installed
from torchrun_controller.reconcile.schedulers.kueue import KUEUE_WORKLOADS
from torchrun_controller.settings import parse

NEVER_SENT: Transport = None  # type: ignore[assignment]
FLAGS = ("--runtime-image", "image", "--metrics-jobs", "1", "--namespace", "team")


class Standby(NoElection):
    def may_write(self) -> bool:
        return False


def assembled_components(metrics: Metrics, *flags: str) -> Components:
    settings = parse([*FLAGS, *flags], {})
    leader = Standby() if settings.leader_election else NoElection()
    return assemble(settings, Sessions(NEVER_SENT, NEVER_SENT), leader, metrics, SYSTEM)


def assembled(*flags: str) -> Metrics:
    """The metrics of a controller with one job in its cache."""
    metrics = Metrics()
    components = assembled_components(metrics, *flags)
    for informer in components.factory.informers:
        if informer.kind is TORCHRUN_JOBS:
            made = job("a", "Running")
            status = replace(made.status, progress=Progress(step=7))
            informer._report_change(informer.store.upsert(replace(made, status=status), 1))
            break
    return metrics


def test_a_leader_exports_the_jobs_of_its_caches() -> None:
    metrics = assembled("--leader-election=false")
    value = metrics.registry.get_sample_value
    assert value("torchrun_leader", {"lease": "", "scope": "team"}) == 1
    assert value("torchrun_jobs", {"phase": "Running"}) == 1
    assert value("torchrun_job_step", {"job_namespace": "team", "torchrun_job": "a"}) == 7


def test_a_standby_exports_that_it_does_not_lead() -> None:
    metrics = assembled("--lease-namespace", "system")
    lease = {"lease": "system/torchrun-controller", "scope": "team"}
    assert metrics.registry.get_sample_value("torchrun_leader", lease) == 0
    assert metrics.registry.get_sample_value("torchrun_jobs", {"phase": "Running"}) is None


def test_the_watches_of_optional_kinds_have_an_age_once_they_are_served() -> None:
    metrics = Metrics()
    components = assembled_components(metrics, "--leader-election=false")
    value = metrics.registry.get_sample_value
    workloads = {"resource": KUEUE_WORKLOADS[0].resource}
    kai_queues = {"resource": KAI_QUEUES.resource}
    assert value("torchrun_watch_age_seconds", workloads) is None
    assert value("torchrun_watch_age_seconds", kai_queues) is None
    served = (KUEUE_WORKLOADS[0], KAI_QUEUES)
    kinds = frozenset((kind.api_version, kind.plural) for kind in served)
    components.factory.discovery._update(Installed(resources=kinds))
    for labels in (workloads, kai_queues):
        assert value("torchrun_watch_age_seconds", labels) == 0
        assert value("torchrun_watch_skipped_frames_total", labels) == 0
    kai = components.queue_view._kai
    kai.synced.set()
    kai.last_seen -= 1000
    assert value("torchrun_watch_age_seconds", kai_queues) >= 1000
    components.factory.discovery._update(Installed())
    assert value("torchrun_watch_age_seconds", kai_queues) == 0
