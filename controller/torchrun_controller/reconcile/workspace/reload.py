"""Hot reload: newer code for a gang that lives, and a sync pod that stands by for it.

A sync pod that ended well has made a revision of the workspace, and so has a serve pod that hands
it out. The newest is named in an annotation of every worker; its launcher takes what changed and
starts the command again, all nodes together, in the pods that are there.
"""

from datetime import datetime

from torchrun_api import contract, names
from torchrun_api.core import Pod
from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at
from torchrun_api.meta import ConditionStatus
from torchrun_api.workspace import SYNCED_SOURCES
from torchrun_controller.reconcile.model.conditions import ConditionUpdate, Reason
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Apply, Delete
from torchrun_controller.reconcile.objects import workspace_source
from torchrun_controller.reconcile.objects.serve_pod import Store, serve_pod
from torchrun_controller.reconcile.objects.sync_pod import sync_pod
from torchrun_controller.reconcile.pods.lifecycle import alive, delete_pod
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.resolve import VolumeSource, resolve_spec
from torchrun_controller.reconcile.workspace import claims, delivery, sync_results
from torchrun_controller.reconcile.workspace import preparation as workspace
from torchrun_controller.reconcile.workspace.helper_pods import SyncState, Workspace


def sync(observed: Observed, now: datetime, defaults: Defaults) -> Workspace | None:
    """The next step towards newer code, beside a gang that lives; None where there is none."""
    wanted = _wanted(observed)
    if wanted is None:
        return None
    step = workspace.prepare(observed, wanted, now, defaults)
    if step.state is not SyncState.READY:
        return step
    job = observed.job
    others = [
        pod for pod in observed.workspace.sync_pods if alive(pod) and pod not in _in_use(observed)
    ]
    if not workspace_source.stands_by(job):
        return Workspace(state=step.state, why=step.why, deletes=_ends(others))
    ready = [pod for pod in others if sync_results.stands_by(job, pod)]
    ends = _ends([pod for pod in others if pod not in ready])
    left = workspace.retry_left(observed, now)
    if ready or not sync_results.revision(observed) or left > 0:
        after = left if left > 0 and not ready else None
        return Workspace(state=step.state, why=step.why, deletes=ends, requeue_after=after)
    return Workspace(
        state=step.state,
        why=step.why,
        applies=(_stand_by(observed, wanted, defaults),),
        deletes=(*workspace.stale(observed), *ends),
    )


def _wanted(observed: Observed) -> VolumeSource | None:
    """The claim that newer code comes to, or what is known of storage that a pod serves from."""
    job = observed.job
    if workspace_source.source_of(job).source not in SYNCED_SOURCES:
        return None
    name = names.workspace_claim(job.metadata.name)
    held = claims.named(observed.workspace.claims, name)
    if held is not None and held.metadata.terminating and not delivery.needs_no_claim(observed):
        return None
    if delivery.is_served(observed):
        try:
            wanted = resolve_spec(job, observed.queue).workspace if observed.queue else None
        except InvalidSpecError:
            return None
        return None if wanted is None or wanted.delivery == "shared" else wanted
    if held is None:
        return None
    # Its workers mount the claim already: no other way is looked for.
    return VolumeSource(name=name, mount_path="", delivery="shared")


def _in_use(observed: Observed) -> list[Pod]:
    """The pods that serve: the newest, and those before until every worker knows of it."""
    serving = [pod for pod in sync_results.done(observed) if delivery.serves(pod)]
    if serving and running(observed) >= sync_results.verdict(serving[-1]).revision:
        return serving[-1:]
    return serving


def _ends(pods: list[Pod]) -> tuple[Delete, ...]:
    return tuple(delete_pod(pod) for pod in pods if not pod.metadata.terminating)


def _stand_by(observed: Observed, wanted: VolumeSource, defaults: Defaults) -> Apply:
    job, latest = observed.job, observed.workspace.sync_pods[-1]
    number = names.number_of(latest.metadata.name) + 1
    known, kept_on = sync_results.revision(observed), latest.metadata.annotations.delivery
    if not kept_on:
        return sync_pod(job, wanted, number, defaults, queue=observed.queue, after=known)
    store: Store = "claim" if kept_on == "claim" else "ephemeral"
    node = delivery.node(observed) if store == "claim" else ""
    return serve_pod(
        job,
        wanted,
        store,
        number,
        defaults,
        queue=observed.queue,
        last_revision=known,
        node=node,
        stands_by=True,
    )


def why_older(observed: Observed, step: Workspace) -> ConditionUpdate | None:
    """That newer code is asked for and the workers run what they have, where that may last."""
    runs, fetched = running(observed), workspace_source.is_fetched(observed.job)
    if step.state is SyncState.READY:
        return _why_not_told(observed, runs, fetched=fetched)
    if not (step.failed or fetched):
        return None
    words = f"{step.why.message}; the workers go on with revision {runs}"
    return _behind("False" if step.failed else "Unknown", step.why.reason, words)


def _why_not_told(observed: Observed, runs: int, *, fetched: bool) -> ConditionUpdate | None:
    known = sync_results.revision(observed)
    if known <= runs:
        return None
    if not all(alive(pod) for pod in observed.gang.workers):
        words = f"revision {known} waits for the next gang, as a worker of this one has ended"
        return _behind("Unknown", "WorkersEnded", words)
    return (
        _behind("Unknown", "Reloading", f"workers are told of revision {known}")
        if fetched
        else None
    )


def _behind(status: ConditionStatus, reason: str, words: str) -> ConditionUpdate:
    return ConditionUpdate(names.UP_TO_DATE, status, Reason(reason, words))


def told(observed: Observed) -> JsonObject:
    """Annotations of the workers: what they shall run, and whether edits are expected."""
    said: JsonObject = {}
    known = sync_results.revision(observed)
    served = [pod for pod in sync_results.done(observed) if delivery.serves(pod)]
    if served and delivery.is_serving(served[-1]):
        manifest = sync_results.verdict(served[-1]).manifest
        said[names.SERVED] = f"{delivery.url(served[-1])} {manifest}"
    if known and (bool(served) is (names.SERVED in said)):
        said[names.REVISION] = str(known)
    if observed.job.spec.development:
        said[names.DEVELOPMENT] = "true"
    return said


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
    variable: JsonObject = {"name": contract.WORKSPACE_REVISION.name, "value": revision}
    return {**container, "env": [*objects_at(container, "env"), variable]}


def running(observed: Observed) -> int:
    """The revision that every worker of the gang has been told to run."""
    said = [pod.metadata.annotations.revision for pod in observed.gang.workers]
    present = observed.job.status.workspace_revision
    if not observed.gang.child_jobs or not said:
        return present
    return min(names.number_in(text, present) for text in said)
