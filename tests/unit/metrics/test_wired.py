from metrics_world import job
from torchrun_api.kinds import TORCHRUN_JOBS
from torchrun_controller.client import Transport
from torchrun_controller.clock import SYSTEM
from torchrun_controller.manager import Sessions, assemble
from torchrun_controller.metrics.registry import Metrics
from torchrun_controller.settings import parse

NEVER_SENT: Transport = None  # type: ignore[assignment]
FLAGS = ("--runtime-image", "image", "--metrics-jobs", "1", "--namespaces", "team,other")


def assembled(*flags: str) -> Metrics:
    """The metrics of a controller with one job in its cache."""
    metrics = Metrics()
    sessions = Sessions(NEVER_SENT, NEVER_SENT, NEVER_SENT)
    components = assemble(parse([*FLAGS, *flags], {}), sessions, metrics, SYSTEM, "me")
    for informer in components.factory.informers:
        if informer.kind is TORCHRUN_JOBS:
            informer._report_change(informer.store.upsert(job("a", "Running"), 1))
            break
    return metrics


def test_a_leader_exports_the_jobs_of_its_caches() -> None:
    metrics = assembled("--leader-election=false")
    value = metrics.registry.get_sample_value
    assert value("torchrun_leader", {"lease": "", "scope": "other,team"}) == 1
    assert value("torchrun_jobs", {"phase": "Running"}) == 1
    assert value("torchrun_job_gpus", {"job_namespace": "team", "torchrun_job": "a"}) == 0


def test_a_standby_exports_that_it_does_not_lead() -> None:
    metrics = assembled("--lease-namespace", "system")
    lease = {"lease": "system/torchrun-controller", "scope": "other,team"}
    assert metrics.registry.get_sample_value("torchrun_leader", lease) == 0
    assert metrics.registry.get_sample_value("torchrun_jobs", {"phase": "Running"}) is None
