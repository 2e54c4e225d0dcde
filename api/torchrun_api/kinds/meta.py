"""Metadata of all kinds: the fields of metav1 that the project reads."""

from collections.abc import Iterable
from datetime import datetime
from typing import Annotated, Literal

from msgspec import Meta, Struct, field

from torchrun_api.names import MOST_GANGS, MOST_NODES, WORKER, number_in


class Wire(Struct, frozen=True, kw_only=True, rename="camel", omit_defaults=True, gc=False):
    """Base of all values that are sent as JSON: camelCase names, immutable, defaults omitted.

    Unknown fields are ignored: a newer API server may send more fields.
    """


# Times without an offset cannot be compared with others.
Time = Annotated[datetime, Meta(tz=True)]


class OwnerReference(Wire, frozen=True, kw_only=True):
    """One entry of `metadata.ownerReferences`."""

    api_version: str = ""
    kind: str = ""
    name: str = ""
    uid: str = ""
    controller: bool = False


def find_controller(references: Iterable[OwnerReference]) -> OwnerReference | None:
    """Return the controller owner reference; an object has at most one."""
    for owner in references:
        if owner.controller:
            return owner
    return None


class ObjectMeta(Wire, frozen=True, kw_only=True):
    """`metadata` of the kinds that users write."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    generation: int = 0
    labels: dict[str, str] = field(default_factory=dict)
    annotations: dict[str, str] = field(default_factory=dict)
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    finalizers: tuple[str, ...] = ()

    @property
    def terminating(self) -> bool:
        """Whether it is being deleted. Finalizers may delay that for a long time."""
        return self.deletion_timestamp is not None


class ChildLabels(Wire, frozen=True, kw_only=True):
    """The labels of a child object that the controller reads; others are not kept."""

    torchrun_job: str = field(default="", name="torchrun-job-name")
    component: str = field(default="", name="app.kubernetes.io/component")
    attempt: str = field(default="", name="torchrun.ai/attempt")
    retained_from: str = field(default="", name="torchrun.ai/retained-from")
    completion_index: str = field(default="", name="batch.kubernetes.io/job-completion-index")
    role: str = field(default="", name="torchrun.ai/role")
    job_uid: str = field(default="", name="torchrun.ai/job-uid")
    queue: str = field(default="", name="torchrun.ai/queue")

    @property
    def rank(self) -> int:
        """Rank of a worker in its gang: its index, plus one if the head has a separate Job."""
        is_beside_head = self.role == WORKER
        index = number_in(self.completion_index, most=MOST_NODES - 1 - is_beside_head)
        return index + is_beside_head

    @property
    def attempt_number(self) -> int:
        """Number of the attempt."""
        return number_in(self.attempt, most=MOST_GANGS)


class ChildAnnotations(Wire, frozen=True, kw_only=True):
    """The annotations of a child object that the controller reads; others are not kept."""

    workspace_sha256: str = field(default="", name="torchrun.ai/workspace-sha256")
    upload_token_sha256: str = field(default="", name="torchrun.ai/upload-token-sha256")
    source: str = field(default="", name="torchrun.ai/source")
    workspace_base: str = field(default="", name="torchrun.ai/workspace-base")
    after_revision: str = field(default="", name="torchrun.ai/after-revision")
    commit: str = field(default="", name="torchrun.ai/commit")
    served: str = field(default="", name="torchrun.ai/served")
    revision: str = field(default="", name="torchrun.ai/revision")
    development: str = field(default="", name="torchrun.ai/development")
    start: str = field(default="", name="torchrun.ai/start")
    gate: str = field(default="", name="torchrun.ai/gate")
    restarts: str = field(default="", name="torchrun.ai/restarts")
    disruptions: str = field(default="", name="torchrun.ai/disruptions")
    cause: str = field(default="", name="torchrun.ai/cause")
    wanted_nodes: str = field(default="", name="torchrun.ai/wanted-nodes")
    nodes: str = field(default="", name="torchrun.ai/nodes")
    delivery: str = field(default="", name="torchrun.ai/delivery")
    claim_node: str = field(default="", name="torchrun.ai/claim-node")
    claim_uid: str = field(default="", name="torchrun.ai/claim-uid")
    first_pod: str = field(default="", name="torchrun.ai/first-pod")
    setup_key: str = field(default="", name="torchrun.ai/setup-key")
    generation: str = field(default="", name="torchrun.ai/generation")
    state: str = field(default="", name="torchrun.ai/state")
    fence: str = field(default="", name="torchrun.ai/fence")
    local_checkpoints: str = field(default="", name="torchrun.ai/local-checkpoints")
    restarts_in_place: str = field(default="", name="torchrun.ai/restarts-in-place")
    checkpoints: str = field(default="", name="torchrun.ai/checkpoints")
    notification_time: str = field(default="", name="torchrun.ai/notification-time")
    gang: str = field(default="", name="torchrun.ai/gang")


class ChildMeta(Wire, frozen=True, kw_only=True):
    """`metadata` of the kinds that the controller creates, with few fields to save memory."""

    name: str = ""
    namespace: str = ""
    uid: str = ""
    resource_version: str = ""
    labels: ChildLabels = ChildLabels()
    annotations: ChildAnnotations = ChildAnnotations()
    owner_references: tuple[OwnerReference, ...] = ()
    creation_timestamp: datetime | None = None
    deletion_timestamp: datetime | None = None
    deletion_grace_period_seconds: int = 0
    finalizers: tuple[str, ...] = ()

    @property
    def terminating(self) -> bool:
        """Whether it is being deleted. Finalizers or a grace period may delay that for long."""
        return self.deletion_timestamp is not None

    def controlled_by(self, uid: str) -> bool:
        """Whether the controller owner reference names the object with this UID."""
        return any(owner.controller and owner.uid == uid for owner in self.owner_references)


ConditionStatus = Literal["True", "False", "Unknown"]


class Condition(Wire, frozen=True, kw_only=True):
    """One metav1 Condition."""

    # It also decodes conditions of pods and Jobs, so only type and status are required.
    type: Annotated[str, Meta(description="Type of the condition.")]
    status: Annotated[ConditionStatus, Meta(description="Whether the condition holds.")]
    observed_generation: Annotated[
        int, Meta(description="Generation of the spec that the condition describes.")
    ] = 0
    last_transition_time: Annotated[
        Time | None, Meta(description="Time of the last change of status.")
    ] = None
    reason: Annotated[str, Meta(description="Machine-readable reason in CamelCase.")] = ""
    message: Annotated[str, Meta(description="What happened, and what to do.")] = ""
