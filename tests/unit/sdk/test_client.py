"""The objects of the client, before any request."""

import json
import textwrap
from pathlib import Path

import pytest

import torchrun_sdk as kt
from torchrun_api.kinds.job import TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.status import TERMINAL
from torchrun_sdk import cli
from torchrun_sdk.cluster import manifest
from torchrun_sdk.compute import seconds
from torchrun_sdk.distributed import hosts
from torchrun_sdk.function import Remote
from torchrun_sdk.source.functions import locate
from torchrun_sdk.spec import Reference


@pytest.fixture(autouse=True)
def _no_switches(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("TORCHRUN_SDK_CPU_ONLY", "TORCHRUN_SDK_IMAGE", "TORCHRUN_QUEUE"):
        monkeypatch.delenv(name, raising=False)


def spec_of(compute: kt.Compute) -> TorchrunJobSpec:
    import msgspec

    body = manifest.build("run", compute)
    return msgspec.convert(json.loads(json.dumps(body)), TorchrunJob).spec


def test_the_job_is_one_of_the_api() -> None:
    volume = kt.Volume("shared", "/data", "1Ti", storage_class="nfs")
    compute = kt.Compute(
        gpus=8, cpus=4, memory="512Gi", image=kt.images.pytorch("24.08-py3"),
        env={"A": 1}, volumes=[volume], queue="gpu", idle_time="10m", max_restarts=2,
    ).distribute(framework="pytorch", workers=4)  # fmt: skip
    spec = spec_of(compute)
    assert (spec.job_queue, spec.num_nodes, spec.image) == (
        "gpu", 4, "nvcr.io/nvidia/pytorch:24.08-py3",
    )  # fmt: skip
    node = spec.node_resources
    assert (node.gpus, node.cpus, node.memory) == (8, "4", "512Gi")
    assert [(variable.name, variable.value) for variable in spec.env] == [
        ("A", "1"),
    ]  # fmt: skip
    assert spec.reliability.rules is not None
    assert spec.reliability.rules[0].action == "fail"
    assert spec.volumes.additional_mounts[0]["mountPath"] == "/data"
    assert volume.claim()["spec"]["storageClassName"] == "nfs"


def test_a_function_of_one_pod_needs_no_torch() -> None:
    assert spec_of(kt.Compute()).launcher == "none"
    assert spec_of(kt.Compute().distribute(workers=1)).launcher == "auto"


def test_ray_has_a_head_if_its_workers_have_other_pods() -> None:
    compute = kt.Compute(cpus="4", memory="16Gi")
    options: dict[str, object] = {"gpus": 1, "cpus": 8, "memory": "32Gi"}
    spec = spec_of(compute.distribute("ray", workers=4, worker_node_options=options))
    node, head = spec.node_resources, spec.head
    assert spec.num_nodes == 5
    assert (node.gpus, node.cpus, node.memory) == (1, "8", "32Gi")
    assert head is not None
    of_head = head.node_resources
    assert (of_head.gpus, of_head.cpus, of_head.memory) == (0, "4", "16Gi")
    alike = compute.distribute("ray", workers=4, worker_node_options={"cpus": 4})
    assert spec_of(alike).head is None
    assert spec_of(compute.distribute("ray", workers=4)).head is None


def test_options_of_workers_are_checked() -> None:
    compute = kt.Compute()
    for framework, options in (
        ("pytorch", {"gpus": 1}),
        ("ray", {"disk": 1}),
        ("ray", {"gpus": -1}),
    ):
        with pytest.raises(kt.UsageError, match="worker_node_options"):
            compute.distribute(framework, worker_node_options=options)


def test_the_switch_for_machines_without_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHRUN_SDK_CPU_ONLY", "1")
    monkeypatch.setenv("TORCHRUN_SDK_IMAGE", "mine:dev")
    spec = spec_of(kt.Compute(gpus=8, image="x"))
    assert (spec.node_resources.gpus, spec.image) == (None, "mine:dev")


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda: kt.Compute(gpus=-1), "gpus is -1"),
        (lambda: kt.Compute(idle_time="soon"), "idle_time is 'soon'"),
        (lambda: kt.Compute().distribute("mpi"), "framework is 'mpi'"),
        (lambda: kt.Compute().distribute(workers=0), "workers is 0"),
        (lambda: kt.Volume("v", "data"), "must start with /"),
        (lambda: kt.fn(print).options(returns="some"), "returns is 'some'"),
        (lambda: kt.fn(seconds)(1), "has no compute"),
        (lambda: kt.fn(seconds).to(kt.Compute())({1: 2}), "Cannot serialize an argument"),
        (lambda: kt.fn(lambda: 0).to(kt.Compute())(), "a lambda"),
        (lambda: kt.App("a", " "), "no cli_command"),
        (lambda: kt.App("a", "torchrun --nnodes=4 t.py", replicas=2), "replicas is 2"),
        (lambda: kt.App("a", "torchrun --nnodes 1:4 t.py", replicas=4), "replicas is 4"),
        (
            lambda: kt.Compute(volumes=[kt.Volume("v", access_mode="ReadWriteOnce")]).distribute(
                "ray"
            ),
            "does not support 2 pods",
        ),
        (
            lambda: kt.Compute(volumes=[kt.Volume("v", access_mode="ReadWriteOnce")]).distribute(
                workers=2
            ),
            "does not support",
        ),
    ],
)
def test_wrong_arguments_are_reported_before_any_request(wrong, message: str) -> None:
    with pytest.raises(kt.UsageError, match=message):
        wrong()


def test_an_app_is_a_job_of_its_command() -> None:
    app = kt.App("ddp", "torchrun --nnodes=4 train.py", gpus=8, replicas=4, ports=[8080])
    body = app.manifest("ddp-1")
    assert body["spec"]["command"] == "torchrun --nnodes=4 train.py"
    assert body["spec"]["numNodes"] == 4
    container = body["spec"]["podTemplate"]["spec"]["containers"][0]
    assert container == {"name": "trainer", "ports": [{"containerPort": 8080}]}


def test_durations() -> None:
    assert [seconds(value, "x") for value in (90, 1.5, "90s", "1h30m")] == [90, 1.5, 90, 5400]


@pytest.mark.parametrize("name", ["train_fn", "_x", "Übung", "9", "a" * 80])
def test_job_names_are_valid_for_kubernetes(name: str) -> None:
    from kubectl_torchrun.upload.job_manifest import check_name

    check_name(manifest.job_name(name))


def test_names_of_the_other_pods() -> None:
    inside = {"PET_MASTER_ADDR": "run-r2-0.run.ml.svc", "PET_NNODES": "1:3"}
    assert hosts(inside) == [f"run-r2-{index}.run.ml.svc" for index in range(3)]
    beside = {"PET_MASTER_ADDR": "run-0.run.ml.svc", "PET_NNODES": "3", "TORCHRUN_ROLE": "worker"}
    assert hosts(beside) == [f"{name}.run.ml.svc" for name in ("run-0", "run-w-0", "run-w-1")]
    assert len(hosts({"PET_MASTER_ADDR": "localhost", "PET_NNODES": "1"})) == 1


def test_the_deployments_of_a_script(tmp_path: Path) -> None:
    script = tmp_path / "s.py"
    script.write_text(
        textwrap.dedent("""
        import torchrun_sdk as kt

        @kt.compute(gpus=8)
        @kt.distribute(framework="pytorch", workers=2)
        def train(): ...

        def other(): ...

        remote = kt.fn(other).to(kt.Compute())
        app = kt.app(name="ddp", cli_command="python t.py")
        remote()
        raise AssertionError("not made here")
        """)
    )
    functions = cli.deployable(script)
    assert [getattr(one, "__name__", "ddp") for one in functions] == ["train", "other", "ddp"]
    found = [
        locate(one.torchrun_function, tmp_path) for one in functions if isinstance(one, Remote)
    ]
    assert [project.function.qualname for project in found] == ["train", "other"]


@pytest.mark.long
def test_the_sdk_imports_few_modules() -> None:
    import subprocess
    import sys

    program = "import sys, torchrun_sdk; print(sorted(m.partition('.')[0] for m in sys.modules))"
    process = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert not {"torch", "ray", "msgspec", "httpx"}.intersection(eval(process.stdout))


def test_ended_phases_are_those_of_the_api() -> None:
    assert set(manifest.TERMINAL_PHASES) == TERMINAL


def test_users_with_one_name_in_two_containers_share_no_warm_pods(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    keys = set()
    for host in ("notebook-ann", "notebook-ben", "notebook-ann"):
        monkeypatch.setattr("socket.gethostname", lambda host=host: host)
        keys.add(manifest.gang_key(kt.Compute(), Reference("f"), tmp_path))
    assert len(keys) == 2
