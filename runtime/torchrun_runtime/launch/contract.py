"""The contract with the controller and the sync pod: names that both sides know.

Generated from torchrun_api (contract, names, exit_codes, contents, peer_loss) by `make generate`.
"""

JOB_NAME = "TORCHRUN_JOB_NAME"  # text
JOB_UID = "TORCHRUN_JOB_UID"  # text
ATTEMPT = "TORCHRUN_ATTEMPT"  # integer
ROLE = "TORCHRUN_ROLE"  # text
CPUS = "TORCHRUN_CPUS"  # integer
COMMAND = "TORCHRUN_COMMAND"  # JSON
LAUNCHER_MODE = "TORCHRUN_LAUNCHER"  # text
WORKING_DIR = "TORCHRUN_WORKING_DIR"  # path
GRACE_SECONDS = "TORCHRUN_GRACE_SECONDS"  # seconds
HANG_TIMEOUT_SECONDS = "TORCHRUN_HANG_TIMEOUT_SECONDS"  # seconds
START_FILE = "TORCHRUN_START_FILE"  # path
GANG_PORT = "TORCHRUN_GANG_PORT"  # integer
GANG_KEY = "TORCHRUN_GANG_KEY"  # text
IN_PLACE_RESTARTS = "TORCHRUN_IN_PLACE_RESTARTS"  # JSON
ROUND = "TORCHRUN_ROUND"  # integer
STATE_DIR = "TORCHRUN_STATE_DIR"  # path
TERMINATION_LOG = "TORCHRUN_TERMINATION_LOG"  # path
WORKSPACE_SOURCE = "TORCHRUN_WORKSPACE_SOURCE"  # path
WORKSPACE_TARGET = "TORCHRUN_WORKSPACE_TARGET"  # path
WORKSPACE_URL = "TORCHRUN_WORKSPACE_URL"  # URL
WORKSPACE_MANIFEST = "TORCHRUN_WORKSPACE_MANIFEST"  # SHA-256
ENV_STORE = "TORCHRUN_ENV_STORE"  # path
ENV_KEY = "TORCHRUN_ENV_KEY"  # text
ENV_DIR = "TORCHRUN_ENV_DIR"  # path
SETUP = "TORCHRUN_SETUP"  # JSON
PROGRESS_URL = "TORCHRUN_PROGRESS_URL"  # URL
PROGRESS_TOKEN_FILE = "TORCHRUN_PROGRESS_TOKEN_FILE"  # path
SYNC_WAIT_SECONDS = "TORCHRUN_SYNC_WAIT_SECONDS"  # seconds
RESOLVE_WAIT_SECONDS = "TORCHRUN_RESOLVE_WAIT_SECONDS"  # seconds
EDIT_WAIT_SECONDS = "TORCHRUN_EDIT_WAIT_SECONDS"  # seconds
STANDBY = "TORCHRUN_STANDBY"  # integer
RESUME_FILE = "TORCHRUN_RESUME_FILE"  # path
LAUNCH_REPORTS = "TORCHRUN_LAUNCH_REPORTS"  # path
STACK_SIGNAL = "TORCHRUN_STACK_SIGNAL"  # integer
DEBUG_SIGNAL = "TORCHRUN_DEBUG_SIGNAL"  # integer
OUTER_PYTHON = "TORCHRUN_OUTER_PYTHON"  # text
PET_NNODES = "PET_NNODES"  # integer
PET_NPROC_PER_NODE = "PET_NPROC_PER_NODE"  # integer
PET_RDZV_BACKEND = "PET_RDZV_BACKEND"  # text
PET_RDZV_CONF = "PET_RDZV_CONF"  # text
PET_RDZV_ENDPOINT = "PET_RDZV_ENDPOINT"  # text
PET_RDZV_ID = "PET_RDZV_ID"  # text
PET_MAX_RESTARTS = "PET_MAX_RESTARTS"  # integer
PET_MASTER_ADDR = "PET_MASTER_ADDR"  # text
PET_MASTER_PORT = "PET_MASTER_PORT"  # integer
PET_NODE_RANK = "PET_NODE_RANK"  # integer
MASTER_ADDR = "MASTER_ADDR"  # text
MASTER_PORT = "MASTER_PORT"  # integer
NNODES = "NNODES"  # integer
NODE_RANK = "NODE_RANK"  # integer

# For variables that are not set; the others default to the empty string.
DEFAULTS = {
    LAUNCHER_MODE: "auto",
    HANG_TIMEOUT_SECONDS: "0",
    START_FILE: "/torchrun-podinfo/annotations",
    TERMINATION_LOG: "/dev/termination-log",
    WORKSPACE_TARGET: "/app",
    PROGRESS_TOKEN_FILE: "/torchrun-token/token",
    SYNC_WAIT_SECONDS: "600",
    RESOLVE_WAIT_SECONDS: "300",
    EDIT_WAIT_SECONDS: "3600",
    STANDBY: "1",
    PET_RDZV_BACKEND: "static",
    PET_MAX_RESTARTS: "0",
}

# Annotations of the worker, in the file that START_FILE names.
START_ANNOTATION = "torchrun.ai/start"
FENCE_ANNOTATION = "torchrun.ai/fence"
IN_PLACE_ANNOTATION = "torchrun.ai/restarts-in-place"
COMPLETE_CHECKPOINTS_ANNOTATION = "torchrun.ai/checkpoints"
REVISION_ANNOTATION = "torchrun.ai/revision"
SERVED_ANNOTATION = "torchrun.ai/served"
DEVELOPMENT_ANNOTATION = "torchrun.ai/development"

# Exit codes of the container.
SETUP_FAILED = 1
SDK_RAISED = 86
HUNG = 124
LAUNCH_FAILED = 125
NOT_EXECUTABLE = 126
NOT_FOUND = 127
STOPPED = 143

# Of a workspace: its marker, and the most bytes that its manifest may have.
MARKER = ".sync_success"
LARGEST_MANIFEST = 134217728

# What follows PROGRESS_URL.
PROGRESS_PATH = "/v1/progress"

# Of the message of a rank that lost its peer, without regard to case.
PEER_LOSS = (
    r"connection (was )?(closed|reset|refused|aborted)",
    r"by peer\b",
    r"broken pipe",
    r"ncclRemoteError",
    r"remote process exited",
    r"socket timeout",
    r"timed out waiting \d+ms",
    r"read error \[",
    r"writeAny",
)
