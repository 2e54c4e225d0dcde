"""Names, labels and annotations that the controller, the plugin and the pods agree on."""

import re

GROUP = "torchrun.ai"

# Labels of every object that the controller makes.
JOB_LABEL = "torchrun-job-name"
ATTEMPT_LABEL = f"{GROUP}/attempt"
RETAINED_LABEL = f"{GROUP}/retained-from"
# Of the child Jobs and workers of a gang whose head has pods of its own: HEAD or WORKER.
ROLE_LABEL = f"{GROUP}/role"
HEAD = "head"
COMPONENT_LABEL = "app.kubernetes.io/component"
MANAGED_BY_LABEL = "app.kubernetes.io/managed-by"
NAME_LABEL = "app.kubernetes.io/name"
INSTANCE_LABEL = "app.kubernetes.io/instance"
MANAGED_BY = "torchrun-controller"

# Of every object of a queue's spec.resources: the queue, see `label_value`. And the finalizer of a
# queue, so that it goes after the jobs that run by it.
QUEUE_LABEL = f"{GROUP}/queue"
QUEUE_FINALIZER = f"{GROUP}/queue"
# Of a KAI queue: namespace/name of the TorchrunQueue that it is made and kept for.
KAI_OWNER = f"{GROUP}/queue"
# Of an object of spec.resources: a digest of the template that it was last applied from.
TEMPLATE = f"{GROUP}/template"

# Values of the component label.
WORKSPACE = "workspace"
CHECKPOINTS = "checkpoints"
SYNC = "sync"
SETUP = "setup"
WORKER = "worker"
NETWORK = "network"
PROBE = "probe"
QUEUE_RESOURCE = "queue-resource"
GANG = "gang"

# Set by the plugin on a TorchrunJob: only an upload with this digest is taken as its workspace.
WORKSPACE_SHA256 = f"{GROUP}/workspace-sha256"
# Set by the plugin on a TorchrunJob: SHA-256 of a token by which any upload is taken.
UPLOAD_TOKEN_SHA256 = f"{GROUP}/upload-token-sha256"
# Set by the plugin on a TorchrunJob: another job, whose workspace the first sync pod may reuse.
WORKSPACE_BASE = f"{GROUP}/workspace-base"

# Set by an administrator on a TorchrunJob: machines that are off and have no Node object any more,
# as "0/node-1,0/node-2": the attempt whose workers were there, and the node.
MACHINES_OFF = f"{GROUP}/machines-off"

# Set by kubectl torchrun sync on a TorchrunJob: any new value fetches the workspace once more.
SYNC_REQUESTED = f"{GROUP}/sync-requested"
# Of a sync pod: a digest of the source that it was made for.
SOURCE = f"{GROUP}/source"

# Of a child Job: what was counted until it was made, and why the gang before it ended.
RESTARTS = f"{GROUP}/restarts"
DISRUPTIONS = f"{GROUP}/disruptions"
CAUSE = f"{GROUP}/cause"
# Of a child Job: whether its workers share a state directory.
STATE = f"{GROUP}/state"
LOCAL_CHECKPOINTS = f"{GROUP}/local-checkpoints"  # bytes
# numNodes when a gang was made of fewer.
WANTED_NODES = f"{GROUP}/wanted-nodes"
# Of the child Job of a head: the number of nodes of its gang. The head is one of them.
NODES = f"{GROUP}/nodes"
# Of a child Job and its workers: the job and the queue whose quota is charged for the gang, and
# with what. They may run for a while after the job is deleted.
CHARGE = f"{GROUP}/charge"
# Of a child Job: who schedules its gang, as spec.scheduling.gang names them.
GANG_SCHEDULER = f"{GROUP}/gang"
# Of a worker: the go-ahead of the start gate, once nothing of an older gang can run any more.
START = f"{GROUP}/start"
# Set by the plugin on a TorchrunJob: the revision that a sync pod has just made, about a second
# before its end shows it. Without this the end does.
WORKSPACE_REVISION = f"{GROUP}/workspace-revision"
# Of a sync pod that stands by: it takes any workspace, as a revision later than this one.
AFTER_REVISION = f"{GROUP}/after-revision"
# Of a sync pod: the commit that alone it takes.
COMMIT = f"{GROUP}/commit"
# Of a worker: the revision of the workspace that it shall run, and whether edits are expected.
REVISION = f"{GROUP}/revision"
DEVELOPMENT = f"{GROUP}/development"
# Of a worker whose workspace a pod serves: the URL and the manifest's SHA-256 of that revision.
SERVED = f"{GROUP}/served"
# Of a worker, with the go-ahead: the ranks wait out the fence first. When it was given, and the
# workers that it is for, as "2026-01-02T03:04:05Z 0:1 1:0-3,7": attempts, and indexes of each.
FENCE = f"{GROUP}/fence"
# Annotation of a worker: when the controller last sent it an update of these.
NOTIFICATION_TIME = f"{GROUP}/notification-time"

# Of a serve pod: where it keeps the workspace, claim or ephemeral.
DELIVERY = f"{GROUP}/delivery"
# Of the tokens that workers show to it.
WORKSPACE_AUDIENCE = f"{GROUP}/workspace"

# Of a setup pod: the content that its environment is made of, and the spec as it was then.
SETUP_KEY = f"{GROUP}/setup-key"
GENERATION = f"{GROUP}/generation"

# Condition of a job whose workers do not run what it asks for: "False" where that came to nothing.
UP_TO_DATE = "WorkspaceUpToDate"

# Of a worker: spec.nodeResources.gpuType of the queue.
GPU_TYPE_LABEL = f"{GROUP}/gpu-type"
# Set by the SDK, which cannot import this module: on a TorchrunJob the kind of the call, and what
# the calls of pods that stay have in common; on pods of KubeRay the name of the call.
SDK_LABEL = f"{GROUP}/sdk"
SDK_GANG_LABEL = f"{GROUP}/sdk-gang"
SDK_RAY_LABEL = f"{GROUP}/sdk-ray"
COMPLETION_INDEX_LABEL = "batch.kubernetes.io/job-completion-index"

TRAINER_CONTAINER = "trainer"
LAUNCHER_CONTAINER = "launcher"
SYNC_CONTAINER = "sync"
SETUP_CONTAINER = "setup"
SYNC_PORT = 8080
SERVE_CONTAINER = "serve"
SERVE_PORT = 8081

# An Indexed Job's pods are named "<job>-r<k>-w-<index>-<5 letters>", in 63 characters.
MAX_JOB_NAME = 45
# The value of a label.
MAX_LABEL = 63

# Digits of a number that a label or an annotation may hold; anybody may write one.
_DIGITS = 15


def number_in(text: str, otherwise: int = 0) -> int:
    """The number that a label or an annotation holds; `otherwise` where it holds none."""
    return int(text) if text.isdecimal() and len(text) <= _DIGITS else otherwise


def number_of(name: str) -> int:
    """The number at the end of a pod's name."""
    return number_in(name.rpartition("-")[2])


def workspace_claim(job: str) -> str:
    """Claim that holds the job's code."""
    return f"{job}-workspace"


def checkpoints_claim(job: str) -> str:
    """Claim that holds the job's checkpoints and outlives it where retained."""
    return f"{job}-checkpoints"


def sync_pod(job: str, number: int) -> str:
    """Pod that prepares the workspace; a new number for each revision or retry."""
    return f"{job}-sync-{number}"


def setup_pod(job: str, number: int) -> str:
    """Pod that makes the job's own environment; a new number for each retry or other content."""
    return f"{job}-setup-{number}"


def probe(job: str, index: int) -> str:
    """Pod that asks the scheduler whether there is room for one more worker."""
    return f"{job}-probe-{index}"


def serve_pod(job: str, number: int | str = "<n>") -> str:
    """Pod that prepares the workspace and serves it to the workers, where no claim is shared."""
    return f"{job}-serve-{number}"


def service(job: str) -> str:
    """Headless Service, the subdomain of the job's pods."""
    return job


def child_job(job: str, attempt: int) -> str:
    """Indexed Job of one attempt: ghosts of an old gang never answer to a new gang's names."""
    return job if attempt == 0 else f"{job}-r{attempt}"


def workers_job(job: str, attempt: int) -> str:
    """Indexed Job of the others, where the first worker has pods of its own as the head."""
    return f"{child_job(job, attempt)}-w"


def is_worker(job: str, name: str) -> bool:
    """Whether a pod's name is that of a worker of this job: of its Jobs an index, and a suffix."""
    return re.fullmatch(rf"{re.escape(job)}(-r\d+)?(-w)?-\d+-[a-z0-9]+", name) is not None


def worker_host(job: str, attempt: int, index: int, namespace: str) -> str:
    """DNS name of one worker; index 0 is the master."""
    return f"{child_job(job, attempt)}-{index}.{service(job)}.{namespace}.svc"


def label_value(name: str) -> str:
    """A name as a label's value: its first 63 characters, which no selector can tell apart."""
    return name[:MAX_LABEL].rstrip("-.")
