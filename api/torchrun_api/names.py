"""Names, labels and annotations that the controller, the plugin and the pods agree on."""

import re

GROUP = "torchrun.ai"

# A category of our CRDs, which shows whose schema an API server has: the Go version of this
# controller has the same group, names and version.
OWN_CATEGORY = "torchrun-python"

# Labels of every object that the controller creates.
JOB_LABEL = "torchrun-job-name"
JOB_UID_LABEL = f"{GROUP}/job-uid"
QUEUE_LABEL = f"{GROUP}/queue"
ATTEMPT_LABEL = f"{GROUP}/attempt"
RETAINED_LABEL = f"{GROUP}/retained-from"
# Label of the child Jobs and workers of a gang whose head has a separate Job: HEAD or WORKER.
ROLE_LABEL = f"{GROUP}/role"
HEAD = "head"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGED_BY = "torchrun-controller"

# Keeps a queue until its jobs are deleted.
QUEUE_FINALIZER = f"{GROUP}/queue"
# Annotation of a KAI queue: namespace/name of the TorchrunQueue for which it was created.
KAI_OWNER = f"{GROUP}/queue"

# Values of the component label.
WORKSPACE = "workspace"
CHECKPOINTS = "checkpoints"
SYNC = "sync"
SETUP = "setup"
WORKER = "worker"
NETWORK = "network"
GANG = "gang"

# Entry of the Secret of a job's gangs.
GANG_KEY = "key"

# Set by the plugin on a TorchrunJob: the digest of the only upload that is accepted.
WORKSPACE_SHA256 = f"{GROUP}/workspace-sha256"
# Set by the plugin on a TorchrunJob: SHA-256 of a token that authorizes any upload.
UPLOAD_TOKEN_SHA256 = f"{GROUP}/upload-token-sha256"
# Set by the plugin on a TorchrunJob: another job whose workspace the first sync pod may reuse.
WORKSPACE_BASE = f"{GROUP}/workspace-base"

# Set by an administrator on a TorchrunJob: machines that are off and no longer have a Node object,
# as "0/node-1,0/node-2": the attempt whose workers ran on the node, and the node.
MACHINES_OFF = f"{GROUP}/machines-off"

# Set by kubectl torchrun sync on a TorchrunJob: any new value starts another fetch.
SYNC_REQUESTED = f"{GROUP}/sync-requested"
# Annotation of a sync pod: a digest of the source for which it was created.
SOURCE = f"{GROUP}/source"

# Annotations of a child Job: the counts when it was created, and why the previous gang ended.
RESTARTS = f"{GROUP}/restarts"
DISRUPTIONS = f"{GROUP}/disruptions"
CAUSE = f"{GROUP}/cause"
# Annotation of a child Job: whether its workers share a state directory.
STATE = f"{GROUP}/state"
LOCAL_CHECKPOINTS = f"{GROUP}/local-checkpoints"  # bytes
# Annotation of a child Job with fewer nodes than numNodes: numNodes when it was created.
WANTED_NODES = f"{GROUP}/wanted-nodes"
# Annotation of the child Job of a head: the number of nodes of its gang, including the head.
NODES = f"{GROUP}/nodes"
# Annotation of a child Job: the scheduler of its gang, a value of spec.scheduling.gang.
GANG_SCHEDULER = f"{GROUP}/gang"
# Annotation of a worker: the permission to start ranks, set once no older gang can run: the number
# of the attempt.
START = f"{GROUP}/start"
# Annotation of a worker: LEADER if the ranks of all nodes start once node 0 has START.
GATE = f"{GROUP}/gate"
LEADER = "leader"
# Set by the plugin on a TorchrunJob: the revision that a sync pod has just published, about a
# second before the pod ends. If it is missing, the end of the pod shows the revision.
WORKSPACE_REVISION = f"{GROUP}/workspace-revision"
# Annotation of a waiting sync pod: it accepts any workspace, as a revision later than this one.
AFTER_REVISION = f"{GROUP}/after-revision"
# Annotation of a sync pod: the only commit that it accepts.
COMMIT = f"{GROUP}/commit"
# Annotations of a worker: the revision of the workspace to run, and whether edits are expected.
REVISION = f"{GROUP}/revision"
DEVELOPMENT = f"{GROUP}/development"
# Annotation of a worker with a serve pod: URL and SHA-256 of the manifest of that revision.
SERVED = f"{GROUP}/served"
# Annotation of a worker, set with START: the launcher fences these workers of older gangs before it
# starts ranks. The time of the order, then attempts with indexes of workers, as in
# "2026-01-02T03:04:05Z 0:1 1:0-3,7".
FENCE = f"{GROUP}/fence"
# Annotation of the worker of node 0, set with START if its Job had another one before, which was
# lost or suspended: the restarts in the same pods so far, and the number of the first round, as in
# "2 3".
IN_PLACE = f"{GROUP}/restarts-in-place"
# Annotation of a worker, in the template of its Job, or set with START if there are newer ones: the
# complete checkpoints from which the ranks may resume, as ASCII JSON, the newest first.
COMPLETE_CHECKPOINTS = f"{GROUP}/checkpoints"
# Annotation of a worker: when the controller last changed one of those above.
NOTIFICATION_TIME = f"{GROUP}/notification-time"

# Annotation of a serve pod: where it stores the workspace, claim or ephemeral.
DELIVERY = f"{GROUP}/delivery"
# Annotation of a sync or serve pod: the only node that it may run on, where its PVC is mounted.
CLAIM_NODE = f"{GROUP}/claim-node"
# Annotation of a sync, serve or setup pod: the UID of its PVC, if that existed before the pod.
CLAIM_UID = f"{GROUP}/claim-uid"
# Annotation of a workspace PVC: the sync pod that was created with it, and so has no UID of it.
FIRST_POD = f"{GROUP}/first-pod"
# Audience of the tokens that workers send to it.
WORKSPACE_AUDIENCE = f"{GROUP}/workspace"

# Annotation of a setup pod: a digest of the content of its environment.
SETUP_KEY = f"{GROUP}/setup-key"
# Annotation of a child Job and a setup pod: the generation of the spec that it was created from.
GENERATION = f"{GROUP}/generation"

# Condition of a job whose workers do not run the requested code; "False" if the update failed.
UP_TO_DATE = "WorkspaceUpToDate"

# Label of a worker: spec.nodeResources.gpuType of the queue.
GPU_TYPE_LABEL = f"{GROUP}/gpu-type"
# Set by the SDK, which cannot import this module: on a TorchrunJob the kind of the call, and a
# digest that is equal for all calls to the same warm pods; on pods of KubeRay the name of the call.
SDK_LABEL = f"{GROUP}/sdk"
SDK_GANG_LABEL = f"{GROUP}/sdk-gang"
SDK_RAY_LABEL = f"{GROUP}/sdk-ray"
COMPLETION_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"
CONTROLLER_UID_LABEL = "batch.kubernetes.io/controller-uid"

TRAINER_CONTAINER = "trainer"
LAUNCHER_DIR = "/torchrun"  # in the trainer container
LAUNCHER = f"{LAUNCHER_DIR}/launch"  # python3 runs this folder
LAUNCHER_CONTAINER = "launcher"
SYNC_CONTAINER = "sync"
SETUP_CONTAINER = "setup"
SYNC_PORT = 8080
SERVE_CONTAINER = "serve"
SERVE_PORT = 8081

# An Indexed Job's pods are named "<job>-r<k>-w-<index>-<5 letters>", in 63 characters.
MAX_JOB_NAME = 45
# Characters of the value of a label.
MAX_LABEL = 63

# Most digits of a number in a label or an annotation: users can set them to any value.
_DIGITS = 15

# What the name of a child Job adds to that of its job, and an Indexed Job's pods to theirs after
# their index: SafeEncodeString in k8s.io/apimachinery/pkg/util/rand.
_GANG = r"(?:-r(\d+))?(?:-w)?"
_SUFFIX = "[bcdfghjklmnpqrstvwxz2456789]{5}"
_AFTER_JOB = re.compile(_GANG)
_AFTER_JOB_OF_POD = re.compile(rf"{_GANG}-\d+-{_SUFFIX}")


# The largest gang, and the largest accepted number of gangs of a job.
MOST_NODES = 10_000
MOST_GANGS = 1_000_000


def number_in(text: str, otherwise: int = 0, *, most: int = 10**_DIGITS) -> int:
    """The number in a label or an annotation; `otherwise` if the text is none of at most `most`.

    Users can edit both, so a number that sizes a list or a loop needs a `most`.
    """
    if not (text.isascii() and text.isdecimal() and len(text) <= _DIGITS):
        return otherwise
    number = int(text)
    return number if number <= most else otherwise


def number_of(name: str) -> int:
    """The number at the end of a pod's name."""
    return number_in(name.rpartition("-")[2])


def workspace_claim(job: str) -> str:
    """PVC of the job's code."""
    return f"{job}-workspace"


def checkpoints_claim(job: str) -> str:
    """PVC of the job's checkpoints. It outlives the job if it is retained."""
    return f"{job}-checkpoints"


def sync_pod(job: str, number: int) -> str:
    """Pod that prepares the workspace; a new number for each revision or retry."""
    return f"{job}-sync-{number}"


def setup_pod(job: str, number: int) -> str:
    """Pod that creates the job's Python environment; a new number for each retry or new content."""
    return f"{job}-setup-{number}"


def serve_pod(job: str, number: int | str = "<n>") -> str:
    """Pod that prepares the workspace and serves it to workers without a shared PVC."""
    return f"{job}-serve-{number}"


def service(job: str) -> str:
    """Headless Service, the subdomain of the job's pods."""
    return job


def gang_secret(job: str, uid: str) -> str:
    """Secret with the key of a job's gangs. The UID tells it from one of an earlier job."""
    return f"{job}-gang-{uid[:8]}"


def child_job(job: str, attempt: int) -> str:
    """Indexed Job of one attempt. Pods of an old gang never have the DNS names of a new one."""
    return job if attempt == 0 else f"{job}-r{attempt}"


def workers_job(job: str, attempt: int) -> str:
    """Indexed Job of the other workers if the head has a separate Job."""
    return f"{child_job(job, attempt)}-w"


def is_child_job(job: str, name: str) -> bool:
    """Whether the name is that of a child Job of this job, of any attempt."""
    return attempt_of_child_job(job, name) is not None


def attempt_of_child_job(job: str, name: str) -> int | None:
    """The attempt in the name of a child Job of this job; None for any other name."""
    match = _AFTER_JOB.fullmatch(name, len(job)) if name.startswith(job) else None
    return None if match is None else int(match[1] or 0)


def is_worker(job: str, name: str) -> bool:
    """Whether the name is that of a worker of this job: a child Job, an index and a suffix."""
    return name.startswith(job) and _AFTER_JOB_OF_POD.fullmatch(name, len(job)) is not None


def worker_host(job: str, attempt: int, index: int, namespace: str) -> str:
    """DNS name of one worker; index 0 is the master."""
    return f"{child_job(job, attempt)}-{index}.{service(job)}.{namespace}.svc"
