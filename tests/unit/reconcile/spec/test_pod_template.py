"""Fields of the pod lifecycle in podTemplate: honoured, or refused with a reason."""

from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from torchrun_controller.reconcile.objects.child_job import worker_template
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.reliability import resolve_reliability
from torchrun_controller.reconcile.spec.resolve import resolve
from torchrun_controller.reconcile.spec.validation import validate
from world import DEFAULTS, World, make_job, make_queue

GRACE = "terminationGracePeriodSeconds"
GPU_LIMIT = {"nvidia.com/gpu": 8}
TOKEN = "automountServiceAccountToken"


def pod(
    job: dict[str, Any] | None = None, queue: dict[str, Any] | None = None, role: str = ""
) -> dict[str, Any]:
    """The PodSpec of the workers. `job` and `queue` are fields of the specs."""
    asked, laid_down = make_job(**{"numNodes": 2, **(job or {})}), make_queue(**(queue or {}))
    validate(asked, laid_down)
    run = resolve(asked, laid_down)
    template = worker_template(asked, laid_down, run, None, 0, "", DEFAULTS, role)
    return msgspec.json.decode(msgspec.json.encode(template["spec"]))


def of(**spec: Any) -> dict[str, Any]:
    """A spec with this podTemplate."""
    return {"podTemplate": {"spec": spec}}


def launcher_grace(made: dict[str, Any]) -> int:
    trainer = next(c for c in made["containers"] if c["name"] == "trainer")
    return int(next(e["value"] for e in trainer["env"] if e["name"] == "TORCHRUN_GRACE_SECONDS"))


def reliability(seconds: int) -> dict[str, Any]:
    return {"reliability": {GRACE: seconds}}


@pytest.mark.parametrize(
    ("job", "queue", "seconds"),
    [
        ({}, {}, 30),
        (of(**{GRACE: 120}), {}, 120),
        (of(**{GRACE: 10}), {}, 10),
        (of(**{GRACE: 0}), {}, 0),
        (of(**{GRACE: None}), {}, 30),
        ({}, of(**{GRACE: 90}), 90),
        # The job overrides its queue; of two values in one object the longer one counts.
        (of(**{GRACE: 10}), of(**{GRACE: 90}), 10),
        (of(**{GRACE: 120}) | reliability(60), reliability(600), 120),
        (of(**{GRACE: 20}) | reliability(60), {}, 60),
        (reliability(60), of(**{GRACE: 600}), 60),
        ({}, of(**{GRACE: 20}) | reliability(300), 300),
        ({"head": {"podTemplate": {"spec": {GRACE: 500}}}}, reliability(60), 500),
    ],
)
def test_the_grace_period_of_a_template_applies_everywhere(
    job: dict[str, Any], queue: dict[str, Any], seconds: int
):
    for role in ("head", "worker") if "head" in job else ("",):
        made = pod(job, queue, role)
        assert made[GRACE] == seconds
        assert launcher_grace(made) == max(seconds - 5, 0)
    asked = make_job(numNodes=2, **job)
    assert resolve_reliability(asked, make_queue(**queue)).grace_seconds == seconds


@pytest.mark.parametrize("value", ["120", -1, True, 1.5, 31536001, [], {}])
def test_an_invalid_grace_period_is_refused(value: object):
    with pytest.raises(InvalidSpecError, match=f"^spec.podTemplate.spec.{GRACE} is "):
        pod(of(**{GRACE: value}))
    assert (
        resolve_reliability(make_job(numNodes=1, **of(**{GRACE: value})), None).grace_seconds == 30
    )


def test_a_deadline_uses_the_grace_period_of_the_template():
    job = make_job(numNodes=1, reliability={"activeDeadlineSeconds": 60}, **of(**{GRACE: 120}))
    world = World(job, make_queue())
    world.settle()
    world.all_workers("Running")
    world.settle()
    world.pass_time(seconds=61)
    assert [d.grace_seconds for d in world.step().deletes] == [120]


@pytest.mark.parametrize("field", [TOKEN, "enableServiceLinks"])
def test_tokens_and_service_variables_only_on_request(field: str):
    assert pod()[field] is False
    assert pod(of(**{field: True}))[field] is True
    assert pod({}, of(**{field: True}))[field] is True
    assert pod(of(**{field: False}), of(**{field: True}))[field] is False


def test_a_job_can_choose_service_variables():
    asked, laid_down = of(enableServiceLinks=True), of(enableServiceLinks=False)
    assert pod(asked, laid_down)["enableServiceLinks"] is True


def test_a_service_account_of_the_queue_has_its_token_by_default():
    queue = {"serviceAccountName": "trainer"}
    assert TOKEN not in pod({}, queue)
    assert pod(of(**{TOKEN: False}), queue)[TOKEN] is False
    assert pod({}, queue | of(**{TOKEN: False}))[TOKEN] is False


@pytest.mark.parametrize("asked", [True, None])
@pytest.mark.parametrize("account", [{}, {"serviceAccountName": "trainer"}])
def test_a_job_mounts_no_token_if_its_queue_forbids_it(asked: bool | None, account: dict[str, Any]):
    with pytest.raises(
        InvalidSpecError, match=f"^spec.podTemplate.spec.{TOKEN} is .* gpu sets it to false"
    ):
        pod(of(**{TOKEN: asked}), of(**{TOKEN: False}) | account)


@pytest.mark.parametrize("policy", ["OnFailure", "Always"])
def test_the_kubelet_restarts_no_worker(policy: str):
    expected = (
        r"^spec.podTemplate.spec.restartPolicy is .* launchers restart the ranks .*maxRestarts"
    )
    with pytest.raises(InvalidSpecError, match=expected):
        pod(of(restartPolicy=policy))
    with pytest.raises(InvalidSpecError, match=r"^TorchrunQueue gpu: podTemplate.spec.restartP"):
        pod({}, of(restartPolicy=policy))
    with pytest.raises(InvalidSpecError, match=r"^spec.head.podTemplate.spec.restartPolicy"):
        pod({"head": of(restartPolicy=policy)}, role="head")
    assert pod(of(restartPolicy="Never"))["restartPolicy"] == "Never"


def test_a_refused_template_is_reported_before_any_object():
    world = World(make_job(numNodes=1, **of(restartPolicy="OnFailure")), make_queue())
    world.settle()
    assert (world.phase, world.job.status.reason) == ("Pending", "InvalidSpec")
    assert not world.created


VALUES = st.one_of(st.none(), st.booleans(), st.integers(-1, 200), st.just("30"))


@settings(deadline=None)
@given(job=VALUES, queue=VALUES)
def test_each_value_is_honoured_or_refused(job: object, queue: object):
    try:
        made = pod(of(**{GRACE: job}), of(**{GRACE: queue}))
    except InvalidSpecError:
        return
    assert made[GRACE] == next((v for v in (job, queue) if v is not None), 30)


def trainer(**fields: Any) -> dict[str, Any]:
    return of(containers=[{"name": "trainer", **fields}])


def gpus(kind: str, amount: object) -> dict[str, Any]:
    return trainer(resources={kind: {"nvidia.com/gpu": amount}})


@pytest.mark.parametrize(
    ("job", "queue", "size", "ranks", "backend"),
    [
        (gpus("limits", 8), {}, (2, 8), 8, "nccl"),
        (gpus("requests", "4"), {}, (2, 4), 4, "nccl"),
        ({}, gpus("limits", 8), (2, 8), 8, "nccl"),
        (gpus("limits", 2), gpus("limits", 8), (2, 2), 2, "nccl"),
        (gpus("limits", 8), {"nodeResources": {"gpus": 8}}, (2, 8), 8, "nccl"),
        ({"numNodes": None, "numGPUs": 12}, gpus("limits", 8), (2, 6), 6, "nccl"),
        (gpus("limits", "many"), {}, (2, 0), 1, "gloo"),
        (
            of(containers=[{"name": "side", "resources": {"limits": GPU_LIMIT}}]),
            {},
            (2, 0),
            1,
            "gloo",
        ),
    ],
)
def test_a_node_has_the_gpus_of_its_pod(
    job: dict[str, Any], queue: dict[str, Any], size: tuple[int, int], ranks: int, backend: str
):
    """As in the queues of the first version, which had them in the template."""
    asked, laid_down = make_job(**{"numNodes": 2, **job}), make_queue(**queue)
    run = resolve(asked, laid_down)
    assert (run.size.nodes, run.size.gpus_per_node) == size
    assert (run.nproc_per_node, run.backend) == (ranks, backend)


@pytest.mark.parametrize(
    ("template", "message"),
    [
        (trainer(command=["python"]), "sets command of the container trainer"),
        (trainer(args=["train.py"]), "sets args of the container trainer"),
        (trainer(env=[{"name": "PET_NNODES", "value": "1"}]), "sets the variable PET_NNODES"),
        (of(subdomain="mine"), "spec.subdomain is"),
        (of(hostname="mine"), "spec.hostname is"),
    ],
)
def test_what_a_template_cannot_set_is_refused(template: dict[str, Any], message: str):
    with pytest.raises(InvalidSpecError, match=f"^spec.podTemplate.*{message}"):
        pod(template)
    with pytest.raises(InvalidSpecError, match=f"^TorchrunQueue gpu: podTemplate.*{message}"):
        pod({}, template)


def test_resources_of_the_template_that_node_resources_override_are_refused():
    node = {"nodeResources": {"gpus": 8, "cpus": 8}}
    for resources in ({"requests": {"cpu": "9"}}, {"limits": {"nvidia.com/gpu": 4}}):
        with pytest.raises(
            InvalidSpecError, match=r"^spec.podTemplate requests (9|4) of .* sets 8"
        ):
            pod(trainer(resources=resources), node)
    pod(trainer(resources={"requests": {"cpu": "8000m", "rdma/ib": 1}}), node)
    pod(trainer(env=[{"name": "NCCL_DEBUG", "value": "INFO"}]))
