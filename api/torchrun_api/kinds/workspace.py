"""The source of a job's code: its fields, and the accepted forms of URLs and refs.

The patterns mean the same to the API server (RE2) and to Python. They are only the first check: the
sync program checks the parts of the URL and the addresses of its host again.
"""

from typing import Annotated, ClassVar, Literal

from msgspec import Meta

from torchrun_api.kinds.meta import Wire
from torchrun_api.kinds.schema import Quantity, Rule
from torchrun_api.kinds.shared import (
    ClaimAccessMode,
    Delivery,
    ImageName,
    LocalObjectReference,
    MountPath,
    ObjectName,
    StorageClassName,
)

WorkspaceSource = Literal["zip", "git", "s3", "existing", "none"]
# Sources that a job fetches by itself, from url.
FETCHED_SOURCES: tuple[WorkspaceSource, ...] = ("git", "s3")
# Sources that a sync pod writes to the PVC.
SYNCED_SOURCES: tuple[WorkspaceSource, ...] = ("zip", *FETCHED_SOURCES)

_HOST = r"([A-Za-z0-9]([A-Za-z0-9.-]*[A-Za-z0-9])?|\[[0-9A-Fa-f:.]+\])(:[0-9]{1,5})?"
_USER = r"[A-Za-z0-9_][A-Za-z0-9._-]*"
_BUCKET = r"[A-Za-z0-9][A-Za-z0-9._-]{1,62}"
_KEY = r"(/[^?#\\\x00-\x20\x7f]*)?"

GIT_URL = rf"^(https://{_HOST}|ssh://({_USER}@)?{_HOST})/[A-Za-z0-9._~%+@,=/-]+$"
S3_URL = rf"^(s3://|https?://{_HOST}/){_BUCKET}{_KEY}$"
S3_ENDPOINT = rf"^https?://{_HOST}/?$"
GIT_REF = r"^[A-Za-z0-9_][A-Za-z0-9._/+@#=,%-]*$"
SUB_PATH = r"^[^/\\\x00-\x1f\x7f]+(/[^/\\\x00-\x1f\x7f]+)*$"

GIT_URL_FORMS = "https://HOST/PATH or ssh://USER@HOST/PATH"
S3_URL_FORMS = "s3://BUCKET/PREFIX or https://ENDPOINT/BUCKET/PREFIX"


def _only(field: str, *sources: str, why: str) -> Rule:
    """The field is allowed with these sources only."""
    listed = ", ".join(f"'{source}'" for source in sources)
    return Rule(
        f"!has(self.{field}) || self.source in [{listed}]",
        f"{field} may only be set with source {' or '.join(sources)}: {why}",
    )


class WorkspaceVolume(Wire, frozen=True, kw_only=True):
    """The source of the code. Without this block the code is in the image.

    kubectl torchrun sets it.
    """

    RULES: ClassVar[tuple[Rule, ...]] = (
        Rule(
            f"!(self.source in {list(FETCHED_SOURCES)}) || has(self.url)",
            f"url is required with source {' or '.join(FETCHED_SOURCES)}",
        ),
        Rule(
            "self.source != 'existing' || has(self.claimName)",
            "claimName is required with source existing",
        ),
        _only("url", *FETCHED_SOURCES, why="remove it or set one of these sources"),
        _only("ref", "git", why="it is a branch, a tag or a commit"),
        _only(
            "subPath",
            *FETCHED_SOURCES,
            "existing",
            why=("an upload contains only the directory itself"),
        ),
        _only("secretRef", *FETCHED_SOURCES, why="no other source uses credentials"),
        _only("claimName", "existing", why="other sources create their own PVC"),
        _only("delivery", *SYNCED_SOURCES, why="no other workspace is delivered"),
        _only("image", *SYNCED_SOURCES, why="no other source has a sync pod"),
        Rule(
            "self.source != 'existing' ||"
            " !(has(self.size) || has(self.storageClassName) || has(self.accessMode))",
            "size, storageClassName and accessMode must not be set with source existing, whose PVC"
            " exists already",
        ),
        Rule(
            f"self.source != 'git' || !has(self.url) || self.url.matches(r'{GIT_URL}')",
            f"url of source git must be {GIT_URL_FORMS}, without password, query or spaces"
            " (git@HOST:PATH is ssh://git@HOST/PATH; credentials are in secretRef)",
        ),
        Rule(
            f"self.source != 's3' || !has(self.url) || self.url.matches(r'{S3_URL}')",
            f"url of source s3 must be {S3_URL_FORMS}, without query or spaces"
            " (credentials are in secretRef)",
        ),
        Rule(
            "!has(self.url) || !self.url.matches(r'(::|/\\.\\.?(/|$)|%00|%0[aAdD])')",
            "url must not have '::', encoded control characters, or '.' or '..' as a component",
        ),
        Rule(
            "!has(self.ref) || !self.ref.matches(r'(\\.\\.|//|@\\{|/\\.|\\.lock(/|$)|[/.]$)')",
            "ref must be the name of a branch or tag, or a commit with all its digits:"
            " no '..', '//' or '@{', no end in '/', '.' or '.lock'",
        ),
        Rule(
            "!has(self.subPath) || !self.subPath.matches(r'(^|/)\\.\\.?(/|$)')",
            "subPath must not have '.' or '..' as a component",
        ),
    )

    enabled: Annotated[bool, Meta(description="Whether the job has a workspace.")] = True
    source: Annotated[
        WorkspaceSource,
        Meta(
            description="zip: an upload by kubectl torchrun. git: a commit of a repository. s3:"
            " objects of a bucket. existing: an existing PVC, mounted read-only. "
            "none: the code is in the image."
        ),
    ] = "zip"
    url: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=2048,
                description=f"git: {GIT_URL_FORMS}. s3: {S3_URL_FORMS}; a key that ends in "
                ".zip, .tar, .tar.gz or .tgz is an archive, any other is the prefix of a folder. "
                "It can be corrected until the job is past Syncing, also while the job is "
                "suspended.",
            ),
        ]
        | None
    ) = None
    ref: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=255,
                pattern=GIT_REF,
                description="git: a branch, a tag, or a full commit hash. Default: the default "
                "branch of the repository. status.workspaceCommit shows the resolved "
                "commit.",
            ),
        ]
        | None
    ) = None
    sub_path: (
        Annotated[
            str,
            Meta(
                min_length=1,
                max_length=1024,
                pattern=SUB_PATH,
                description="Directory of the repository, the objects or the PVC that becomes the "
                "workspace. Default: all of it.",
            ),
        ]
        | None
    ) = None
    secret_ref: (
        Annotated[
            LocalObjectReference,
            Meta(
                description="Secret that only the sync pod mounts. git over https: username, "
                "password; over ssh: ssh-privatekey, known_hosts. s3: "
                "AWS_ACCESS_KEY_ID, AWS_SECRET_ACCESS_KEY and, if needed, "
                "AWS_SESSION_TOKEN, AWS_REGION, AWS_ENDPOINT_URL. Both: ca.crt for a "
                "private certificate authority."
            ),
        ]
        | None
    ) = None
    claim_name: (
        Annotated[
            ObjectName, Meta(description="existing: name of the PVC, in the job's namespace.")
        ]
        | None
    ) = None
    image: (
        Annotated[
            ImageName,
            Meta(
                description="Image of the sync pod. It must contain torchrun-sync. Default: the "
                "controller's image."
            ),
        ]
        | None
    ) = None
    delivery: Delivery | None = None
    size: Annotated[Quantity, Meta(description="Size of the PVC. Default: the queue's.")] | None = (
        None
    )
    storage_class_name: StorageClassName | None = None
    access_mode: ClaimAccessMode | None = None
    mount_path: (
        Annotated[
            MountPath,
            Meta(
                description="Mount path of the workspace in the pods. Default: the queue's, usually"
                " /app."
            ),
        ]
        | None
    ) = None
