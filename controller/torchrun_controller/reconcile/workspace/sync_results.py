"""What sync pods have made, and which of it is what the job asks for."""

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_api.job import TorchrunJob
from torchrun_controller.reconcile.model.observed import Observed
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.workspace import claims, delivery
from torchrun_controller.reconcile.workspace.retry import SyncMessage, end_of


def verdict(pod: Pod) -> SyncMessage:
    """What a sync pod made, or why it did not."""
    return end_of(pod, names.SYNC_CONTAINER).message


def done(observed: Observed, store: str | None = None) -> list[Pod]:
    """Sync pods that ended well, and those that serve, of one kind of storage where that is said.

    What those before the present claim made is gone with theirs.
    """
    name = names.workspace_claim(observed.job.metadata.name)
    held = claims.named(observed.workspace.claims, name)
    since = held.metadata.creation_timestamp if held else None
    return [
        pod
        for pod in observed.workspace.sync_pods
        if store is None or pod.metadata.annotations.delivery == store
        if delivery.has_content(pod)
        and not (since and (made := pod.metadata.creation_timestamp) and made < since)
    ]


def newest(observed: Observed, store: str) -> Pod | None:
    """The last of these, where that is what the job asks for."""
    pods = done(observed, store)
    if not pods:
        return None
    job, last = observed.job, pods[-1]
    stood_by = bool(last.metadata.annotations.after_revision) and not workspace_source.is_fetched(
        job
    )
    same = stood_by and verdict(last).sha256 == workspace_source.upload_digest(job)
    return last if same or is_current(job, last) else None


def revision(observed: Observed) -> int:
    """The newest revision of the workspace that is known to be whole; 0 for none."""
    made = (verdict(pod).revision for pod in done(observed))
    known = max(made, default=0) or observed.job.status.workspace_revision
    said = observed.job.metadata.annotations.get(names.WORKSPACE_REVISION, "")
    served = any(delivery.serves(pod) for pod in observed.workspace.sync_pods)
    return known + 1 if known and not served and said == str(known + 1) else known


def commit_of(observed: Observed, number: int) -> str:
    """What a revision was fetched as; "" where nothing says so."""
    known = (verdict(pod) for pod in reversed(done(observed)))
    return next((said.commit for said in known if said.revision == number), "")


def takes(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod takes what the job asks for, be it among other things.

    One that takes no particular upload takes any by the token that it was made with.
    """
    said = pod.metadata.annotations
    by_token = not (said.workspace_sha256 or workspace_source.is_fetched(job))
    if by_token and said.upload_token_sha256 != workspace_source.upload_token(job):
        return False
    return is_current(job, pod) or stands_by(job, pod)


def stands_by(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod takes any upload by the token that the job announces now."""
    token = workspace_source.upload_token(job)
    said = pod.metadata.annotations
    return bool(said.after_revision and token) and said.upload_token_sha256 == token


def is_current(job: TorchrunJob, pod: Pod) -> bool:
    """Whether the pod was made for the source that the job names now."""
    made_for = pod.metadata.annotations
    return (made_for.workspace_sha256, made_for.source) == (
        workspace_source.upload_digest(job),
        workspace_source.digest(job),
    )


def pinned(job: TorchrunJob, latest: Pod | None) -> str:
    """The commit that must come again: code never changes under a gang unless somebody asks."""
    if job.status.workers is None or not workspace_source.is_fetched(job):
        return ""
    if latest is None:
        return job.status.workspace_commit
    if not is_current(job, latest):
        return ""
    if delivery.has_content(latest):
        return verdict(latest).commit or job.status.workspace_commit
    return latest.metadata.annotations.commit
