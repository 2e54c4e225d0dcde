"""The environment variables of a job's pods, each declared once.

The controller writes them through `Variable.env_var`, sync and serve pods read them through
`Variable.read`. The launcher runs in the user's image and can import none of this: `make generate`
writes its module, runtime/torchrun_runtime/launch/contract.py, and docs/environment.md from here
(see `contract_reference`).
"""

from torchrun_api.variable import COUNT, JSON, PATH, SECONDS, SHA256, TEXT, URL, Variable

# Who sets a variable, and who reads it.
CONTROLLER = "controller"
LAUNCHER = "launcher"
RANK = "rank modules"  # what the launcher puts on PYTHONPATH of the ranks
SDK = "SDK"
SERVE = "serve pod"
SYNC = "sync pod"
TESTS = "tests"
TORCHRUN = "torchrun"
USER = "user"  # spec.env where it is set, the command where it is read


# Workers: what the job is.
JOB_NAME = Variable("TORCHRUN_JOB_NAME", TEXT, (USER, SDK), "Name of the TorchrunJob.")
JOB_UID = Variable(
    "TORCHRUN_JOB_UID", TEXT, (LAUNCHER,), "UID of the TorchrunJob; names its gangs."
)
ATTEMPT = Variable(
    "TORCHRUN_ATTEMPT",
    COUNT,
    (LAUNCHER, SDK, USER),
    "Number of the attempt that the worker belongs to; the first is 0.",
)
ROLE = Variable(
    "TORCHRUN_ROLE",
    TEXT,
    (LAUNCHER, USER),
    "`head` or `worker` where the job has a head; not set elsewhere.",
)
BACKEND = Variable(
    "TORCHRUN_BACKEND", TEXT, (USER,), "Backend for `init_process_group`: nccl or gloo."
)

# Workers: what runs.
COMMAND = Variable(
    "TORCHRUN_COMMAND",
    JSON,
    (LAUNCHER,),
    "spec.command: a string (a shell line) or a list of strings (an argument vector).",
)
LAUNCHER_MODE = Variable(
    "TORCHRUN_LAUNCHER", TEXT, (LAUNCHER,), "spec.launcher: auto, torchrun or none.", default="auto"
)
WORKING_DIR = Variable(
    "TORCHRUN_WORKING_DIR",
    PATH,
    (LAUNCHER,),
    "Directory of the command; the workspace where it is not set.",
)
GRACE_SECONDS = Variable(
    "TORCHRUN_GRACE_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "Time that ranks have to end after SIGTERM; as long as the kubelet allows where it is not set.",
)
HANG_TIMEOUT_SECONDS = Variable(
    "TORCHRUN_HANG_TIMEOUT_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "spec.reliability.hangTimeoutSeconds; 0 for no hang watch.",
    default="0",
)
START_FILE = Variable(
    "TORCHRUN_START_FILE",
    PATH,
    (LAUNCHER,),
    "File of the pod's annotations (downward API), which bring the go-ahead and newer code.",
)
STATE_DIR = Variable(
    "TORCHRUN_STATE_DIR",
    PATH,
    (LAUNCHER, SDK),
    "Directory that all gangs of the job share: fencing, copies of logs, results.",
)
TERMINATION_LOG = Variable(
    "TORCHRUN_TERMINATION_LOG",
    PATH,
    (LAUNCHER, SYNC),
    "File of the termination message.",
    set_by=(TESTS,),
    default="/dev/termination-log",
)

# Workers: the workspace.
WORKSPACE_SOURCE = Variable(
    "TORCHRUN_WORKSPACE_SOURCE",
    PATH,
    (LAUNCHER, SDK),
    "Where the workspace comes from: the mounted claim, or the folder of the token for the server.",
)
WORKSPACE_TARGET = Variable(
    "TORCHRUN_WORKSPACE_TARGET",
    PATH,
    (LAUNCHER, SDK),
    "Where the node's own copy of the workspace goes.",
    default="/app",
)
WORKSPACE_URL = Variable(
    "TORCHRUN_WORKSPACE_URL",
    URL,
    (LAUNCHER,),
    "The serve pod, where the job has no shared storage.",
)
WORKSPACE_MANIFEST = Variable(
    "TORCHRUN_WORKSPACE_MANIFEST", SHA256, (LAUNCHER,), "The manifest that the serve pod must have."
)
WORKSPACE_REVISION = Variable(
    "TORCHRUN_WORKSPACE_REVISION",
    TEXT,
    (LAUNCHER,),
    "Revision that the gang starts with; later ones get a rendezvous of their own.",
)

# Workers: the job's own Python environment.
ENV_STORE = Variable(
    "TORCHRUN_ENV_STORE", PATH, (LAUNCHER,), "Folder of the job's Python environments."
)
ENV_KEY = Variable("TORCHRUN_ENV_KEY", TEXT, (LAUNCHER,), "Name of the environment in that folder.")
ENV_DIR = Variable(
    "TORCHRUN_ENV_DIR",
    PATH,
    (LAUNCHER, USER),
    "Path of the environment in use, the same in every pod.",
    set_by=(CONTROLLER, LAUNCHER),
)
SETUP = Variable(
    "TORCHRUN_SETUP",
    JSON,
    (LAUNCHER,),
    'What to install, as {"requirements": [...], "command": ...}, in a pod that makes it.',
)

# Workers: progress.
PROGRESS_URL = Variable(
    "TORCHRUN_PROGRESS_URL",
    URL,
    (LAUNCHER,),
    "The controller's Service, which takes reports of progress.",
)
PROGRESS_TOKEN_FILE = Variable(
    "TORCHRUN_PROGRESS_TOKEN_FILE", PATH, (LAUNCHER,), "Token for those reports."
)

# Workers: how long to wait.
SYNC_WAIT_SECONDS = Variable(
    "TORCHRUN_SYNC_WAIT_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "How long a worker waits for its workspace, and for its Python environment.",
    set_by=(USER,),
    default="600",
)
RESOLVE_WAIT_SECONDS = Variable(
    "TORCHRUN_RESOLVE_WAIT_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "How long a worker waits for the DNS name of the master.",
    set_by=(USER,),
    default="300",
)
EDIT_WAIT_SECONDS = Variable(
    "TORCHRUN_EDIT_WAIT_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "How long a failed command waits for the next edit in development mode.",
    set_by=(USER,),
    default="3600",
)

# Ranks.
LAUNCH_REPORTS = Variable(
    "TORCHRUN_LAUNCH_REPORTS",
    PATH,
    (RANK,),
    "Folder of heartbeats, progress, stacks and reports of exceptions.",
    set_by=(LAUNCHER,),
)
STACK_SIGNAL = Variable(
    "TORCHRUN_STACK_SIGNAL",
    COUNT,
    (RANK,),
    "Signal on which a Python process writes its stacks.",
    set_by=(LAUNCHER,),
)

# torchrun's own options, and what other launchers of ranks expect.
_RENDEZVOUS = (TORCHRUN, LAUNCHER)
PET_NNODES = Variable("PET_NNODES", COUNT, _RENDEZVOUS, "Nodes of the gang.")
PET_NPROC_PER_NODE = Variable("PET_NPROC_PER_NODE", COUNT, (TORCHRUN,), "Ranks of each node.")
PET_RDZV_BACKEND = Variable(
    "PET_RDZV_BACKEND", TEXT, (TORCHRUN,), "Rendezvous backend: c10d or static."
)
PET_RDZV_ENDPOINT = Variable("PET_RDZV_ENDPOINT", TEXT, _RENDEZVOUS, "host:port of the rendezvous.")
PET_RDZV_ID = Variable(
    "PET_RDZV_ID", TEXT, _RENDEZVOUS, "Rendezvous id, of the job's UID and attempt."
)
PET_MAX_RESTARTS = Variable(
    "PET_MAX_RESTARTS", COUNT, (TORCHRUN,), "Restarts of ranks inside the pods."
)
PET_MASTER_ADDR = Variable(
    "PET_MASTER_ADDR", TEXT, (*_RENDEZVOUS, SDK), "DNS name of the first worker."
)
PET_MASTER_PORT = Variable("PET_MASTER_PORT", COUNT, _RENDEZVOUS, "Port of the first worker.")
PET_NODE_RANK = Variable(
    "PET_NODE_RANK",
    COUNT,
    (TORCHRUN,),
    "Index of the worker; the launcher counts the head as 0.",
    set_by=(CONTROLLER, LAUNCHER),
)
MASTER_ADDR = Variable(
    "MASTER_ADDR", TEXT, (LAUNCHER, USER), "As PET_MASTER_ADDR, without torchrun."
)
MASTER_PORT = Variable(
    "MASTER_PORT", COUNT, (LAUNCHER, USER), "As PET_MASTER_PORT, without torchrun."
)
NNODES = Variable("NNODES", COUNT, (USER,), "As PET_NNODES, without torchrun.")
NODE_RANK = Variable(
    "NODE_RANK",
    COUNT,
    (LAUNCHER, RANK, USER),
    "As PET_NODE_RANK, without torchrun.",
    set_by=(CONTROLLER, LAUNCHER),
)

# Sync pods.
SYNC_SOURCE = Variable(
    "TORCHRUN_SYNC_SOURCE",
    TEXT,
    (SYNC,),
    "Where the workspace comes from: zip, git or s3.",
    default="zip",
)
SYNC_URL = Variable("TORCHRUN_SYNC_URL", URL, (SYNC,), "Repository or bucket.")
SYNC_REF = Variable("TORCHRUN_SYNC_REF", TEXT, (SYNC,), "Branch, tag or commit.")
SYNC_SUB_PATH = Variable("TORCHRUN_SYNC_SUB_PATH", PATH, (SYNC,), "Part of the source to take.")
SYNC_COMMIT = Variable("TORCHRUN_SYNC_COMMIT", TEXT, (SYNC,), "The only content to take, if any.")
SYNC_SOURCE_DIGEST = Variable(
    "TORCHRUN_SYNC_SOURCE_DIGEST",
    TEXT,
    (SYNC,),
    "Digest of the source's fields; the marker names it.",
)
SYNC_SECRET = Variable("TORCHRUN_SYNC_SECRET", TEXT, (SYNC,), "Name of the source's Secret.")
SYNC_SECRET_DIR = Variable(
    "TORCHRUN_SYNC_SECRET_DIR", PATH, (SYNC,), "Where that Secret is mounted."
)
SYNC_FETCH_TIMEOUT_SECONDS = Variable(
    "TORCHRUN_SYNC_FETCH_TIMEOUT_SECONDS",
    SECONDS,
    (SYNC,),
    "How long git or s3 may take.",
    set_by=(TESTS,),
    default="3600",
)
SYNC_DIR = Variable(
    "TORCHRUN_SYNC_DIR", PATH, (SYNC,), "The claim, writable.", default="/workspace"
)
SYNC_HOST = Variable(
    "TORCHRUN_SYNC_HOST",
    TEXT,
    (SYNC,),
    "Address to listen on; all where it is not set.",
    set_by=(TESTS,),
)
SYNC_PORT = Variable("TORCHRUN_SYNC_PORT", COUNT, (SYNC,), "Port to listen on.", default="8080")
SYNC_SHA256 = Variable(
    "TORCHRUN_SYNC_SHA256", SHA256, (SYNC,), "Take this archive, or this manifest, only."
)
SYNC_UPLOAD_TOKEN_SHA256 = Variable(
    "TORCHRUN_SYNC_UPLOAD_TOKEN_SHA256",
    SHA256,
    (SYNC,),
    "Of the token that clients show as X-Torchrun-Upload-Token, or name the digest above.",
)
SYNC_AFTER = Variable(
    "TORCHRUN_SYNC_AFTER", COUNT, (SYNC,), "Make a revision later than this one.", default="0"
)
SYNC_BASE = Variable(
    "TORCHRUN_SYNC_BASE",
    PATH,
    (SYNC,),
    "Another workspace claim, whose files need not be sent again.",
)
SYNC_READ_TIMEOUT_SECONDS = Variable(
    "TORCHRUN_SYNC_READ_TIMEOUT_SECONDS",
    SECONDS,
    (SYNC,),
    "Silence after which a client is given up.",
    set_by=(TESTS,),
    default="60",
)
SYNC_MAX_ENTRIES = Variable(
    "TORCHRUN_SYNC_MAX_ENTRIES",
    COUNT,
    (SYNC,),
    "Files and directories of an archive.",
    set_by=(TESTS,),
    default="200000",
)
SYNC_MAX_BYTES = Variable(
    "TORCHRUN_SYNC_MAX_BYTES",
    COUNT,
    (SYNC,),
    "Bytes of an archive, and of all that it holds.",
    set_by=(TESTS,),
    default=str(50 * 2**30),
)
SYNC_MAX_PATH = Variable(
    "TORCHRUN_SYNC_MAX_PATH", COUNT, (SYNC,), "Bytes of one path.", set_by=(TESTS,), default="3840"
)
SYNC_MAX_DEPTH = Variable(
    "TORCHRUN_SYNC_MAX_DEPTH",
    COUNT,
    (SYNC,),
    "Components of one path.",
    set_by=(TESTS,),
    default="100",
)
SYNC_MAX_RATIO = Variable(
    "TORCHRUN_SYNC_MAX_RATIO",
    COUNT,
    (SYNC,),
    "Bytes held for each byte of the archive.",
    set_by=(TESTS,),
    default="200",
)
SYNC_MAX_RATIO_FLOOR = Variable(
    "TORCHRUN_SYNC_MAX_RATIO_FLOOR",
    COUNT,
    (SYNC,),
    "Bytes held up to which the ratio is not looked at.",
    set_by=(TESTS,),
    default=str(2**30),
)

# Serve pods.
SERVE_NAMESPACE = Variable(
    "TORCHRUN_SERVE_NAMESPACE", TEXT, (SERVE,), "Namespace of the workers that are served."
)
SERVE_JOB = Variable("TORCHRUN_SERVE_JOB", TEXT, (SERVE,), "Job of those workers.")
SERVE_DIR = Variable(
    "TORCHRUN_SERVE_DIR",
    PATH,
    (SERVE,),
    "Where torchrun-sync makes the workspace.",
    default="/workspace",
)
SERVE_HOST = Variable(
    "TORCHRUN_SERVE_HOST",
    TEXT,
    (SERVE,),
    "Address to listen on; all where it is not set.",
    set_by=(TESTS,),
)
SERVE_PORT = Variable("TORCHRUN_SERVE_PORT", COUNT, (SERVE,), "Port to listen on.", default="8081")
SERVE_API_DIR = Variable(
    "TORCHRUN_SERVE_API_DIR",
    PATH,
    (SERVE,),
    "Token and ca.crt for requests to the API server, for the keys of service-account tokens.",
    default="/torchrun-api",
)

# In the order of their declarations, by the name of the constant.
VARIABLES: dict[str, Variable[str] | Variable[int] | Variable[object]] = {
    name: value for name, value in list(globals().items()) if isinstance(value, Variable)
}


def usage(reader: str) -> str:
    """The variables of a reader for the help text of its program: a line each."""
    return "\n".join(
        f"  {variable.name} ({variable.default})  {variable.meaning}"
        for variable in VARIABLES.values()
        if reader in variable.read_by
    )
