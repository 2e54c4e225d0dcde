"""The environment variables of workers, each declared once. `sync` has the others.

The controller writes them with `Variable.env_var`. The launcher runs in the user's image and cannot
import this module: `make generate` writes its module, runtime/torchrun_runtime/launch/contract.py,
and docs/environment.md from here (see `contract_reference`).
"""

from torchrun_api.contract.variable import (
    CONTROLLER,
    COUNT,
    JSON,
    LAUNCHER,
    PATH,
    RANK,
    SDK,
    SECONDS,
    SHA256,
    SYNC,
    TESTS,
    TEXT,
    TORCHRUN,
    URL,
    USER,
    Variable,
)

# Workers: identity of the job.
JOB_NAME = Variable("TORCHRUN_JOB_NAME", TEXT, (LAUNCHER, SDK, USER), "Name of the TorchrunJob.")
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
    "TORCHRUN_BACKEND",
    TEXT,
    (USER,),
    "Backend for `init_process_group`, by default nccl with GPUs and gloo without.",
)

CPUS = Variable(
    "TORCHRUN_CPUS",
    COUNT,
    (LAUNCHER, USER),
    "CPUs that the training container requests, rounded up; 0 without a request. Divided by the"
    " ranks of the node, they are the default of OMP_NUM_THREADS, unless `launcher` is none.",
)

# Workers: the command.
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
    "Time between SIGTERM and SIGKILL for the ranks: 5 s less than the grace period of the pod. If"
    " not set: the limit of the kubelet.",
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
    "Annotations of the pod (downward API): the start of the gang, and newer code. Empty: none.",
    default="/torchrun-podinfo/annotations",
)
GANG_PORT = Variable(
    "TORCHRUN_GANG_PORT",
    COUNT,
    (LAUNCHER,),
    "Port of the launcher of node 0, which starts and stops the ranks of all nodes. If not set:"
    " each node starts by itself.",
)
GANG_KEY = Variable(
    "TORCHRUN_GANG_KEY",
    TEXT,
    (LAUNCHER,),
    "Random key of the job, from a Secret, by which its launchers know each other. The launcher"
    " removes it from the environment of the command, whose output viewers read. If not set: the"
    " UID of the job.",
)
IN_PLACE_RESTARTS = Variable(
    "TORCHRUN_IN_PLACE_RESTARTS",
    JSON,
    (LAUNCHER,),
    'Restarts in the same pods: {"restarts": 3, "exitCodes": [], "signals": []}, with the exit'
    " codes and signals of spec.reliability.rules. If not set: none.",
)
ROUND = Variable(
    "TORCHRUN_ROUND",
    COUNT,
    (USER,),
    "Number of the current start of the ranks in these pods. The first is 0.",
    set_by=(LAUNCHER,),
)
STATE_DIR = Variable(
    "TORCHRUN_STATE_DIR",
    PATH,
    (LAUNCHER, SDK, USER),
    "Directory that all gangs of the job share, for fencing, copies of logs, results and your own "
    "files. Not set without a workspace PVC that pods can write, or with direct delivery.",
)
CHECKPOINT_DIR = Variable(
    "TORCHRUN_CHECKPOINT_DIR",
    PATH,
    (USER,),
    "Directory for checkpoints, which all gangs of the job share. Not set without storage for"
    " checkpoints.",
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
PROGRESS_PATH = "/v1/progress"  # after PROGRESS_URL: what launchers post their reports to
PROGRESS_TOKEN_FILE = Variable(
    "TORCHRUN_PROGRESS_TOKEN_FILE",
    PATH,
    (LAUNCHER,),
    "File with the token for progress reports.",
    default="/torchrun-token/token",
)

# Workers: time limits of waits.
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
    "How long a pod waits for the DNS name of the master before it starts its ranks, and for a"
    " network that does not reach the pod of node 0.",
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
STANDBY = Variable(
    "TORCHRUN_STANDBY",
    COUNT,
    (LAUNCHER,),
    "0: no torchrun with torch imported waits for the next round. It makes restarts in the same"
    " pods faster, and takes about 0.5 GB of memory on each node.",
    set_by=(USER,),
    default="1",
)

# Ranks.
RESUME_FILE = Variable(
    "TORCHRUN_RESUME_FILE",
    PATH,
    (RANK, USER),
    'File with the checkpoint to resume from, as {"step": 1200, "path": "/checkpoints/step-1200"}.'
    " Always set. The file does not exist if there is no checkpoint.",
    set_by=(LAUNCHER,),
)
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
DEBUG_SIGNAL = Variable(
    "TORCHRUN_DEBUG_SIGNAL",
    COUNT,
    (RANK,),
    "Signal that makes a Python process start the debugger that `kubectl torchrun debug` wants.",
    set_by=(LAUNCHER,),
)
OUTER_PYTHON = Variable(
    "TORCHRUN_OUTER_PYTHON",
    TEXT,
    (RANK,),
    "Process ID of the outermost Python process of the rank, and RANK.",
    set_by=(LAUNCHER,),
)

# torchrun's options, and variables that other launchers of ranks expect.
_RENDEZVOUS = (TORCHRUN, LAUNCHER)
PET_NNODES = Variable("PET_NNODES", COUNT, _RENDEZVOUS, "Number of nodes in the gang.")
PET_NPROC_PER_NODE = Variable("PET_NPROC_PER_NODE", COUNT, _RENDEZVOUS, "Number of ranks per node.")
PET_RDZV_BACKEND = Variable(
    "PET_RDZV_BACKEND",
    TEXT,
    _RENDEZVOUS,
    "Rendezvous backend: static, c10d, etcd or etcd-v2.",
    set_by=(CONTROLLER, LAUNCHER),
    default="static",
)
PET_RDZV_CONF = Variable(
    "PET_RDZV_CONF",
    TEXT,
    _RENDEZVOUS,
    "Settings of the rendezvous. The launcher adds is_host=false if it serves the c10d store.",
    set_by=(USER, LAUNCHER),
)
PET_RDZV_ENDPOINT = Variable(
    "PET_RDZV_ENDPOINT",
    TEXT,
    _RENDEZVOUS,
    "Rendezvous address, host:port, with the port of the round. The controller sets only another"
    " address than that of the first pod.",
    set_by=(CONTROLLER, LAUNCHER),
)
PET_RDZV_ID = Variable(
    "PET_RDZV_ID",
    TEXT,
    _RENDEZVOUS,
    "Rendezvous ID, from the UID of the job, the attempt and the round.",
    set_by=(LAUNCHER,),
)
PET_MAX_RESTARTS = Variable(
    "PET_MAX_RESTARTS",
    COUNT,
    (TORCHRUN,),
    "Number of restarts inside the pods.",
    set_by=(CONTROLLER, LAUNCHER),
    default="0",
)
PET_MASTER_ADDR = Variable(
    "PET_MASTER_ADDR", TEXT, (*_RENDEZVOUS, SDK), "DNS name of the first pod."
)
PET_MASTER_PORT = Variable(
    "PET_MASTER_PORT",
    COUNT,
    _RENDEZVOUS,
    "Port of the first pod. Later rounds use the next 15 ports in turn.",
    set_by=(CONTROLLER, LAUNCHER),
)
PET_NODE_RANK = Variable(
    "PET_NODE_RANK",
    COUNT,
    (TORCHRUN,),
    "Index of the node. The launcher counts the head as 0.",
    set_by=(LAUNCHER,),
)
MASTER_ADDR = Variable(
    "MASTER_ADDR",
    TEXT,
    (LAUNCHER, USER),
    "PET_MASTER_ADDR for commands without torchrun.",
    set_by=(LAUNCHER,),
)
MASTER_PORT = Variable(
    "MASTER_PORT",
    COUNT,
    (LAUNCHER, USER),
    "PET_MASTER_PORT for commands without torchrun.",
    set_by=(LAUNCHER,),
)
NNODES = Variable(
    "NNODES",
    COUNT,
    (USER,),
    "PET_NNODES for commands without torchrun.",
    set_by=(LAUNCHER,),
)
NODE_RANK = Variable(
    "NODE_RANK",
    COUNT,
    (LAUNCHER, RANK, USER),
    "PET_NODE_RANK for commands without torchrun.",
    set_by=(CONTROLLER, LAUNCHER),
)
