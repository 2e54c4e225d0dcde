"""The environment variables of sync and serve pods, which deliver the workspace.

The controller writes them with `Variable.env_var`, and the programs of the pods read them with
`Variable.read`. `make generate` writes docs/environment.md from here (see `contract_reference`).
"""

from torchrun_api.contract.variable import (
    CONTROLLER,
    COUNT,
    PATH,
    SECONDS,
    SERVE,
    SHA256,
    SYNC,
    TESTS,
    TEXT,
    URL,
    Variable,
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
SYNC_JOB_UID = Variable(
    "TORCHRUN_SYNC_JOB_UID",
    TEXT,
    (SYNC,),
    "UID of the job, recorded in the marker: a retained PVC may have the workspace of another job.",
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
    "TORCHRUN_SYNC_AFTER",
    COUNT,
    (SYNC,),
    "Wait for an upload that is later than this revision.",
    default="0",
)
SYNC_LAST_REVISION = Variable(
    "TORCHRUN_SYNC_LAST_REVISION",
    COUNT,
    (SYNC,),
    "Number new revisions after this one, even if the PVC does not show it.",
    default="0",
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
    set_by=(CONTROLLER, TESTS),
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
