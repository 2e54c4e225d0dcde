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
    "TORCHRUN_JOB_UID", TEXT, (LAUNCHER,), "UID of the TorchrunJob. Names its gangs."
)
ATTEMPT = Variable(
    "TORCHRUN_ATTEMPT",
    COUNT,
    (LAUNCHER, SDK, USER),
    "Number of the current attempt. The first is 0.",
)
ROLE = Variable(
    "TORCHRUN_ROLE",
    TEXT,
    (LAUNCHER, USER),
    "`head` or `worker` if the job has a head, else not set.",
)
BACKEND = Variable(
    "TORCHRUN_BACKEND", TEXT, (USER,), "Backend for `init_process_group`: nccl or gloo."
)

# Workers: what runs.
COMMAND = Variable(
    "TORCHRUN_COMMAND",
    JSON,
    (LAUNCHER,),
    "spec.command: a string (shell line) or a list of strings (program and arguments).",
)
LAUNCHER_MODE = Variable(
    "TORCHRUN_LAUNCHER", TEXT, (LAUNCHER,), "spec.launcher: auto, torchrun or none.", default="auto"
)
WORKING_DIR = Variable(
    "TORCHRUN_WORKING_DIR",
    PATH,
    (LAUNCHER,),
    "Working directory of the command. If not set: the workspace.",
)
GRACE_SECONDS = Variable(
    "TORCHRUN_GRACE_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "Time between SIGTERM and SIGKILL for the ranks. If not set: the limit of the kubelet.",
)
HANG_TIMEOUT_SECONDS = Variable(
    "TORCHRUN_HANG_TIMEOUT_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "spec.reliability.hangTimeoutSeconds. 0 disables it.",
    default="0",
)
START_FILE = Variable(
    "TORCHRUN_START_FILE",
    PATH,
    (LAUNCHER,),
    "Annotations of the pod (downward API): the start of the gang, and newer code.",
)
STATE_DIR = Variable(
    "TORCHRUN_STATE_DIR",
    PATH,
    (LAUNCHER, SDK),
    "Directory that all gangs of the job share, for fencing, copies of logs and results.",
)
TERMINATION_LOG = Variable(
    "TORCHRUN_TERMINATION_LOG",
    PATH,
    (LAUNCHER, SYNC),
    "File for the termination message.",
    set_by=(TESTS,),
    default="/dev/termination-log",
)

# Workers: the workspace.
WORKSPACE_SOURCE = Variable(
    "TORCHRUN_WORKSPACE_SOURCE",
    PATH,
    (LAUNCHER, SDK),
    "Source of the workspace: the mounted PVC, or the folder with the token for the serve pod.",
)
WORKSPACE_TARGET = Variable(
    "TORCHRUN_WORKSPACE_TARGET",
    PATH,
    (LAUNCHER, SDK),
    "Directory for the pod's own copy of the workspace.",
    default="/app",
)
WORKSPACE_URL = Variable(
    "TORCHRUN_WORKSPACE_URL",
    URL,
    (LAUNCHER,),
    "Address of the serve pod, if the job uses direct delivery.",
)
WORKSPACE_MANIFEST = Variable(
    "TORCHRUN_WORKSPACE_MANIFEST",
    SHA256,
    (LAUNCHER,),
    "Digest of the manifest that the serve pod must have.",
)
WORKSPACE_REVISION = Variable(
    "TORCHRUN_WORKSPACE_REVISION",
    TEXT,
    (LAUNCHER,),
    "Revision with which the gang starts. Each later revision has its own rendezvous.",
)

# Workers: the job's own Python environment.
ENV_STORE = Variable(
    "TORCHRUN_ENV_STORE", PATH, (LAUNCHER,), "Folder with the Python environments of the job."
)
ENV_KEY = Variable(
    "TORCHRUN_ENV_KEY", TEXT, (LAUNCHER,), "Name of the environment in TORCHRUN_ENV_STORE."
)
ENV_DIR = Variable(
    "TORCHRUN_ENV_DIR",
    PATH,
    (LAUNCHER, USER),
    "Path of the current environment. The same in every pod.",
    set_by=(CONTROLLER, LAUNCHER),
)
SETUP = Variable(
    "TORCHRUN_SETUP",
    JSON,
    (LAUNCHER,),
    'What a setup pod installs: {"requirements": [...], "command": ...}.',
)

# Workers: progress.
PROGRESS_URL = Variable(
    "TORCHRUN_PROGRESS_URL",
    URL,
    (LAUNCHER,),
    "Service of the controller that receives progress reports.",
)
PROGRESS_TOKEN_FILE = Variable(
    "TORCHRUN_PROGRESS_TOKEN_FILE", PATH, (LAUNCHER,), "File with the token for progress reports."
)

# Workers: how long to wait.
SYNC_WAIT_SECONDS = Variable(
    "TORCHRUN_SYNC_WAIT_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "How long a pod waits for its workspace and for its Python environment.",
    set_by=(USER,),
    default="600",
)
RESOLVE_WAIT_SECONDS = Variable(
    "TORCHRUN_RESOLVE_WAIT_SECONDS",
    SECONDS,
    (LAUNCHER,),
    "How long a pod waits for the DNS name of the master.",
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
    "Folder for heartbeats, progress, stacks and exception reports.",
    set_by=(LAUNCHER,),
)
STACK_SIGNAL = Variable(
    "TORCHRUN_STACK_SIGNAL",
    COUNT,
    (RANK,),
    "Signal that makes a Python process write its stacks.",
    set_by=(LAUNCHER,),
)

# torchrun's own options, and what other launchers of ranks expect.
_RENDEZVOUS = (TORCHRUN, LAUNCHER)
PET_NNODES = Variable("PET_NNODES", COUNT, _RENDEZVOUS, "Number of nodes in the gang.")
PET_NPROC_PER_NODE = Variable("PET_NPROC_PER_NODE", COUNT, (TORCHRUN,), "Number of ranks per node.")
PET_RDZV_BACKEND = Variable(
    "PET_RDZV_BACKEND", TEXT, (TORCHRUN,), "Rendezvous backend: c10d or static."
)
PET_RDZV_ENDPOINT = Variable(
    "PET_RDZV_ENDPOINT", TEXT, _RENDEZVOUS, "Rendezvous address, host:port."
)
PET_RDZV_ID = Variable(
    "PET_RDZV_ID", TEXT, _RENDEZVOUS, "Rendezvous ID, from the UID of the job and the attempt."
)
PET_MAX_RESTARTS = Variable(
    "PET_MAX_RESTARTS", COUNT, (TORCHRUN,), "Number of restarts inside the pods."
)
PET_MASTER_ADDR = Variable(
    "PET_MASTER_ADDR", TEXT, (*_RENDEZVOUS, SDK), "DNS name of the first pod."
)
PET_MASTER_PORT = Variable("PET_MASTER_PORT", COUNT, _RENDEZVOUS, "Port of the first pod.")
PET_NODE_RANK = Variable(
    "PET_NODE_RANK",
    COUNT,
    (TORCHRUN,),
    "Index of the node. The launcher counts the head as 0.",
    set_by=(CONTROLLER, LAUNCHER),
)
MASTER_ADDR = Variable(
    "MASTER_ADDR", TEXT, (LAUNCHER, USER), "PET_MASTER_ADDR for commands without torchrun."
)
MASTER_PORT = Variable(
    "MASTER_PORT", COUNT, (LAUNCHER, USER), "PET_MASTER_PORT for commands without torchrun."
)
NNODES = Variable("NNODES", COUNT, (USER,), "PET_NNODES for commands without torchrun.")
NODE_RANK = Variable(
    "NODE_RANK",
    COUNT,
    (LAUNCHER, RANK, USER),
    "PET_NODE_RANK for commands without torchrun.",
    set_by=(CONTROLLER, LAUNCHER),
)

# Sync pods.
SYNC_SOURCE = Variable(
    "TORCHRUN_SYNC_SOURCE",
    TEXT,
    (SYNC,),
    "Source of the workspace: zip, git or s3.",
    default="zip",
)
SYNC_URL = Variable("TORCHRUN_SYNC_URL", URL, (SYNC,), "Repository or bucket.")
SYNC_REF = Variable("TORCHRUN_SYNC_REF", TEXT, (SYNC,), "Branch, tag or commit.")
SYNC_SUB_PATH = Variable("TORCHRUN_SYNC_SUB_PATH", PATH, (SYNC,), "Subdirectory of the source.")
SYNC_COMMIT = Variable("TORCHRUN_SYNC_COMMIT", TEXT, (SYNC,), "If set, the only content to accept.")
SYNC_SOURCE_DIGEST = Variable(
    "TORCHRUN_SYNC_SOURCE_DIGEST",
    TEXT,
    (SYNC,),
    "Digest of the fields of the source, recorded in the marker.",
)
SYNC_SECRET = Variable("TORCHRUN_SYNC_SECRET", TEXT, (SYNC,), "Name of the Secret of the source.")
SYNC_SECRET_DIR = Variable(
    "TORCHRUN_SYNC_SECRET_DIR", PATH, (SYNC,), "Directory where this Secret is mounted."
)
SYNC_FETCH_TIMEOUT_SECONDS = Variable(
    "TORCHRUN_SYNC_FETCH_TIMEOUT_SECONDS",
    SECONDS,
    (SYNC,),
    "Time limit for git and s3.",
    set_by=(TESTS,),
    default="3600",
)
SYNC_DIR = Variable(
    "TORCHRUN_SYNC_DIR",
    PATH,
    (SYNC,),
    "Directory where the PVC is mounted, writable.",
    default="/workspace",
)
SYNC_HOST = Variable(
    "TORCHRUN_SYNC_HOST",
    TEXT,
    (SYNC,),
    "Address to listen on. If not set: all addresses.",
    set_by=(TESTS,),
)
SYNC_PORT = Variable("TORCHRUN_SYNC_PORT", COUNT, (SYNC,), "Port to listen on.", default="8080")
SYNC_SHA256 = Variable(
    "TORCHRUN_SYNC_SHA256", SHA256, (SYNC,), "Accept only the archive or manifest with this digest."
)
SYNC_UPLOAD_TOKEN_SHA256 = Variable(
    "TORCHRUN_SYNC_UPLOAD_TOKEN_SHA256",
    SHA256,
    (SYNC,),
    "Digest of the upload token, which clients send as X-Torchrun-Upload-Token.",
)
SYNC_AFTER = Variable(
    "TORCHRUN_SYNC_AFTER", COUNT, (SYNC,), "Create a revision later than this one.", default="0"
)
SYNC_BASE = Variable(
    "TORCHRUN_SYNC_BASE",
    PATH,
    (SYNC,),
    "Directory of another workspace PVC, whose files are reused.",
)
SYNC_READ_TIMEOUT_SECONDS = Variable(
    "TORCHRUN_SYNC_READ_TIMEOUT_SECONDS",
    SECONDS,
    (SYNC,),
    "Time without data after which a client is disconnected.",
    set_by=(TESTS,),
    default="60",
)
SYNC_MAX_ENTRIES = Variable(
    "TORCHRUN_SYNC_MAX_ENTRIES",
    COUNT,
    (SYNC,),
    "Maximum number of files and directories in an archive.",
    set_by=(TESTS,),
    default="200000",
)
SYNC_MAX_BYTES = Variable(
    "TORCHRUN_SYNC_MAX_BYTES",
    COUNT,
    (SYNC,),
    "Maximum size of an archive, compressed and extracted, in bytes.",
    set_by=(TESTS,),
    default=str(50 * 2**30),
)
SYNC_MAX_PATH = Variable(
    "TORCHRUN_SYNC_MAX_PATH",
    COUNT,
    (SYNC,),
    "Maximum length of a path, in bytes.",
    set_by=(TESTS,),
    default="3840",
)
SYNC_MAX_DEPTH = Variable(
    "TORCHRUN_SYNC_MAX_DEPTH",
    COUNT,
    (SYNC,),
    "Maximum number of path components.",
    set_by=(TESTS,),
    default="100",
)
SYNC_MAX_RATIO = Variable(
    "TORCHRUN_SYNC_MAX_RATIO",
    COUNT,
    (SYNC,),
    "Maximum compression ratio.",
    set_by=(TESTS,),
    default="200",
)
SYNC_MAX_RATIO_FLOOR = Variable(
    "TORCHRUN_SYNC_MAX_RATIO_FLOOR",
    COUNT,
    (SYNC,),
    "Extracted size up to which the ratio is not checked, in bytes.",
    set_by=(TESTS,),
    default=str(2**30),
)

# Serve pods.
SERVE_NAMESPACE = Variable(
    "TORCHRUN_SERVE_NAMESPACE",
    TEXT,
    (SERVE,),
    "Namespace of the pods that may fetch the workspace.",
)
SERVE_JOB = Variable("TORCHRUN_SERVE_JOB", TEXT, (SERVE,), "Job of these pods.")
SERVE_DIR = Variable(
    "TORCHRUN_SERVE_DIR",
    PATH,
    (SERVE,),
    "Directory where torchrun-sync creates the workspace.",
    default="/workspace",
)
SERVE_HOST = Variable(
    "TORCHRUN_SERVE_HOST",
    TEXT,
    (SERVE,),
    "Address to listen on. If not set: all addresses.",
    set_by=(TESTS,),
)
SERVE_PORT = Variable("TORCHRUN_SERVE_PORT", COUNT, (SERVE,), "Port to listen on.", default="8081")
SERVE_API_DIR = Variable(
    "TORCHRUN_SERVE_API_DIR",
    PATH,
    (SERVE,),
    "Token and ca.crt for the API server, which has the keys of service account tokens.",
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
