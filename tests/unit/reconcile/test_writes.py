"""The requests of a new job until its gang exists, stored beside the tests.

`pytest --update-golden` rewrites them. Read the diff before you commit it.
"""

from typing import Any

import pytest

from shell_world import GOLDEN, ShellWorld, as_documents, compare
from world import ZIP, make_job, make_queue

FULL_QUEUE = {
    "nodeResources": {
        "gpus": 8,
        "cpus": 96,
        "memory": "512Gi",
        "gpuType": "h100-80gb",
        "extra": {"rdma/ib": 1},
    },
    "imagePullPolicy": "IfNotPresent",
    "imagePullSecrets": [{"name": "registry"}],
    "serviceAccountName": "trainer",
    "workingDir": "/app/src",
    "securityContext": {"capabilities": {"add": ["IPC_LOCK"]}},
    "networking": {"hostNetwork": True},
    "storage": {
        "shmSizePerGPU": "8Gi",
        "workspace": {"sizePerGPU": "10Gi", "storageClassName": "fast"},
        "checkpoints": {"sizePerGPU": "50Gi"},
        "datasets": [{"name": "web", "claimName": "web-data", "mountPath": "/data"}],
    },
    "scheduling": {
        "scheduler": "gpu-scheduler",
        "priorityClassName": "gpu-priority",
        "nodeSelector": {"gpu.nvidia.com/class": "H100"},
        "tolerations": [{"key": "gpu", "operator": "Exists"}],
        "affinity": {"podAntiAffinity": {}},
    },
    "podTemplate": {
        "metadata": {"labels": {"team": "vision"}},
        "spec": {
            "terminationGracePeriodSeconds": 60,
            "containers": [
                {"name": "trainer", "env": [{"name": "NCCL_DEBUG", "value": "INFO"}]},
                {"name": "exporter", "image": "exporter:1"},
            ],
        },
    },
}
CASES = {
    "one-cpu-node": (make_job(numNodes=1), make_queue()),
    "two-nodes-zip": (make_job(numNodes=2, volumes=ZIP), make_queue()),
    "claim-that-workers-cannot-write": (
        make_job(
            numNodes=1,
            volumes={"workspace": {"source": "zip", "accessMode": "ReadOnlyMany"}},
        ),
        make_queue(),
    ),
    "partial-gpus-everything": (
        make_job(
            numGPUs=12,
            volumes={
                "workspace": {"source": "zip", "mountPath": "/src", "size": "1Gi"},
                "checkpoints": {"retain": False},
                "datasets": [
                    {"name": "mine", "claimName": "m", "mountPath": "/m", "readOnly": False}
                ],
                "additionalVolumes": [{"name": "scratch", "emptyDir": {}}],
                "additionalMounts": [{"name": "scratch", "mountPath": "/scratch"}],
            },
            image="mine:2",
            env=[
                {"name": "A", "value": "1"},
                {"name": "B", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
                {"name": "C"},
            ],
            labels={"run": "7"},
            annotations={"note": "x"},
            launcher="torchrun",
            distributed={"nprocPerNode": 2, "maxRestarts": 1, "port": 1234},
            scheduling={"priorityClassName": "urgent", "nodeSelector": {"zone": "a"}},
            podTemplate={"spec": {"terminationGracePeriodSeconds": 90}},
        ),
        make_queue(**FULL_QUEUE),
    ),
    "git": (
        make_job(
            numNodes=1,
            volumes={
                "workspace": {
                    "source": "git",
                    "url": "https://git.example/acme/train.git",
                    "ref": "main",
                    "subPath": "llm",
                    "secretRef": {"name": "git-login"},
                }
            },
        ),
        make_queue(),
    ),
    "s3": (
        make_job(
            numNodes=1,
            volumes={
                "workspace": {
                    "source": "s3",
                    "url": "s3://code/train",
                    "image": "mirror/torchrun:1",
                }
            },
        ),
        make_queue(),
    ),
    "existing": (
        make_job(
            numNodes=1,
            volumes={"workspace": {"source": "existing", "claimName": "code", "subPath": "train"}},
        ),
        make_queue(),
    ),
    "setup-on-the-claim": (
        make_job(
            numNodes=2,
            volumes=ZIP,
            setupCommand="make -C kernels install",
            requirements=["einops>=0.8", "-r requirements.txt"],
            env=[{"name": "PIP_INDEX_URL", "value": "https://pypi.example/simple"}],
            annotations_={"torchrun.ai/workspace-sha256": "ab" * 32},
        ),
        make_queue(
            **{
                **FULL_QUEUE,
                "podTemplate": {
                    "metadata": {"annotations": {"team": "vision"}},
                    "spec": {
                        "resourceClaims": [{"name": "gpus", "resourceClaimName": "gpus"}],
                        "initContainers": [{"name": "warm", "image": "warm:1"}],
                        "containers": [
                            {"name": "exporter", "image": "exporter:1"},
                            {"name": "trainer", "readinessProbe": {"exec": {"command": ["true"]}}},
                        ],
                    },
                },
            }
        ),
    ),
    "direct-delivery": (
        make_job(
            numNodes=2,
            volumes={"workspace": {"source": "zip", "delivery": "direct", "size": "1Gi"}},
        ),
        make_queue(),
    ),
    "restricted": (
        make_job(
            numNodes=2,
            volumes={**ZIP, "checkpoints": {}},
            podTemplate={"spec": {"initContainers": [{"name": "warm", "image": "warm:1"}]}},
        ),
        make_queue(podSecurity="restricted", securityContext={"runAsGroup": 0}),
    ),
    "head-and-workers": (
        make_job(
            numNodes=3,
            command="python serve.py",
            nodeResources={"gpus": 4},
            head={
                "nodeResources": {"gpus": 0, "cpus": 4, "memory": "16Gi"},
                "podTemplate": {"spec": {"nodeSelector": {"pool": "cpu"}}},
            },
        ),
        make_queue(
            nodeResources={"gpus": 8, "cpus": 96, "memory": "512Gi"},
            storage={"shmSizePerGPU": "8Gi"},
        ),
    ),
    "isolated": (make_job(numNodes=2), make_queue(networking={"isolate": True})),
    "setup-in-every-worker": (
        make_job(numNodes=1, setupCommand=["pip", "install", "einops"]),
        make_queue(),
    ),
    "elastic-c10d-list-command": (
        make_job(
            numNodes=2, elastic={"minNodes": 1, "maxNodes": 4}, command=["python", "train.py"]
        ),
        make_queue(),
    ),
    "retained-checkpoints-image-from-template": (
        make_job(
            numNodes=1,
            podTemplate={"spec": {"containers": [{"name": "trainer", "image": "mine"}]}},
        ),
        make_queue(
            image=None,
            nodeResources={"cpus": "500m"},
            storage={"checkpoints": {"size": "1Gi"}},
        ),
    ),
    "etcd-endpoint-shared-checkpoints": (
        make_job(
            numNodes=2,
            distributed={"rdzvBackend": "etcd-v2", "rdzvEndpoint": "etcd:2379"},
            volumes={"checkpoints": {"claimName": "shared", "mountPath": "/ckpt"}},
        ),
        make_queue(),
    ),
}


def start(world: ShellWorld) -> dict[str, Any]:
    """What is sent until the gang exists, by what happened before."""
    sent = {"the user creates the job": world.step_and_take()}
    served = any("-serve-" in name for _, name in world.created)
    for what, prepare in (
        ("the workspace is ready", world.serves if served else world.sync_done),
        ("the setup is done", world.setup_done),
    ):
        if world.phase == "Syncing":
            prepare()
            sent[what] = world.step_and_take()
    return sent


def child_job(world: ShellWorld) -> Any:
    """The Job that is created for the first gang."""
    sent = (entry for entries in start(world).values() for entry in entries)
    jobs = (entry["body"] for entry in sent if "/jobs/train?" in entry.get("request", ""))
    return next(jobs)


@pytest.mark.parametrize("name", CASES)
def test_the_requests_of_a_new_job(name, pytestconfig):
    compare(
        as_documents(start(ShellWorld(*CASES[name])).items()), GOLDEN / f"{name}.yaml", pytestconfig
    )


@pytest.mark.parametrize("name", CASES)
def test_names_in_merged_lists_are_unique(name):
    for container in child_job(ShellWorld(*CASES[name]))["spec"]["template"]["spec"]["containers"]:
        names = [variable["name"] for variable in container.get("env", [])]
        assert len(names) == len(set(names))


@pytest.mark.parametrize(
    "spec",
    [
        {"annotations": {"karpenter.sh/do-not-disrupt": "false"}},
        {"podTemplate": {"metadata": {"annotations": {"karpenter.sh/do-not-disrupt": "false"}}}},
    ],
)
def test_a_user_can_allow_autoscalers_to_evict_a_gang(spec):
    job = child_job(ShellWorld(make_job(numNodes=1, **spec), make_queue()))
    annotations = job["spec"]["template"]["metadata"]["annotations"]
    assert annotations["karpenter.sh/do-not-disrupt"] == "false"
    assert annotations["cluster-autoscaler.kubernetes.io/safe-to-evict"] == "false"
