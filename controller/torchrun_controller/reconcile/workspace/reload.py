"""Hot reload: newer code for a gang that lives, and a sync pod that stands by for it.

A sync pod that ended well has made a revision of the workspace. The newest is named in an
annotation of every worker; its launcher copies what changed and starts the command again, all nodes
together, in the pods that are there.
"""

from datetime import datetime

from torchrun_api import names
from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at
from torchrun_controller.reconcile.observed import Defaults, Observed
from torchrun_controller.reconcile.run import Claim
from torchrun_controller.reconcile.workers import alive, delete
from torchrun_controller.reconcile.workspace import preparation as workspace
from torchrun_controller.reconcile.workspace import source
from torchrun_controller.reconcile.workspace.preparation import Progress, Workspace
from torchrun_controller.reconcile.workspace.sync_pod import sync_pod


def sync(observed: Observed, now: datetime, defaults: Defaults) -> Workspace | None:
    """The next step towards newer code, beside a gang that lives; None where there is no claim."""
    job = observed.job
    name = names.workspace_claim(job.metadata.name)
    held = next((c for c in observed.claims if c.metadata.name == name), None)
    if any(pod.metadata.annotations.delivery for pod in observed.sync_pods):
        return None  # what a pod serves is there once
    if source.source_of(job).source != "zip":
        return None  # what is fetched is asked for by name, and changes with the next gang alone
    if held is None or held.metadata.deletion_timestamp is not None:
        return None
    # Its workers mount the claim already: no other way is looked for.
    wanted = Claim(name=name, mount_path="", delivery="shared")
    step = workspace.prepare(observed, wanted, now, defaults)
    if step.progress is not Progress.READY:
        return step
    alive_ones = [pod for pod in observed.sync_pods if alive(pod)]
    if not job.spec.development:
        ends = tuple(delete(p) for p in alive_ones if p.metadata.deletion_timestamp is None)
        return Workspace(progress=step.progress, why=step.why, deletes=ends)
    known = workspace.revision(observed)
    if not known or alive_ones:
        return None
    left = workspace.retry_left(observed, now)
    if left > 0:
        return Workspace(progress=step.progress, why=step.why, requeue_after=left)
    number = names.number_of(observed.sync_pods[-1].metadata.name) + 1 if observed.sync_pods else 0
    return Workspace(
        progress=step.progress,
        why=step.why,
        applies=(sync_pod(job, wanted, number, defaults, after=known),),
        deletes=workspace.stale(observed),
    )


def told(observed: Observed) -> JsonObject:
    """Annotations of the workers: what they shall run, and whether edits are expected."""
    made: JsonObject = {}
    known = workspace.revision(observed)
    if known:
        made[names.REVISION] = str(known)
    if observed.job.spec.development:
        made[names.DEVELOPMENT] = "true"
    return made


def marked(template: JsonObject, observed: Observed) -> JsonObject:
    """The workers' template with the same, and the revision that the gang begins with."""
    metadata, spec = object_at(template, "metadata"), object_at(template, "spec")
    added = told(observed)
    if not added:
        return template
    first = added.get(names.REVISION)
    annotations = object_at(metadata, "annotations") | added
    containers: list[JsonValue] = [_begins(c, first) for c in objects_at(spec, "containers")]
    return {
        **template,
        "metadata": metadata | {"annotations": annotations},
        "spec": spec | {"containers": containers},
    }


def _begins(container: JsonObject, revision: JsonValue) -> JsonObject:
    if container.get("name") != names.TRAINER_CONTAINER or not revision:
        return container
    variable: JsonObject = {"name": "TORCHRUN_WORKSPACE_REVISION", "value": revision}
    return {**container, "env": [*objects_at(container, "env"), variable]}


def running(observed: Observed) -> int:
    """The revision that every worker of the gang has been told to run."""
    said = [pod.metadata.annotations.revision for pod in observed.workers]
    present = observed.job.status.workspace_revision
    if not observed.child_jobs or not said:
        return present
    return min(names.number_in(text, present) for text in said)
