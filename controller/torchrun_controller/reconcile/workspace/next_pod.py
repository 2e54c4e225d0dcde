"""The next sync or serve pod of a job, and the node that it needs."""

from datetime import datetime

from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.serve_pod import Store, serve_pod
from torchrun_controller.reconcile.objects.sync_pod import sync_pod
from torchrun_controller.reconcile.spec.resolve import VolumeSource
from torchrun_controller.reconcile.workspace import claim_node, claims, sync_results


def build_pod(
    observed: Observed,
    source: VolumeSource,
    store: Store,
    number: int,
    defaults: Defaults,
    now: datetime,
    *,
    commit: str = "",
    base: str = "",
    stands_by: bool = False,
) -> Apply:
    """Build a serve pod, or a sync pod if there is no `store`.

    A pod that `stands_by` accepts any upload. Only a sync pod can reuse the files of `base`.
    """
    job, queue, workspace = observed.job, observed.queue, observed.workspace
    find_revision = sync_results.find_revision if stands_by else sync_results.find_last_revision
    last_revision = find_revision(job, workspace)
    node = next(iter(claim_node.find_nodes(observed, source, store, now) or ()), "")
    pod = sync_pod(
        job,
        source,
        number,
        defaults,
        commit,
        queue=queue,
        last_revision=last_revision,
        stands_by=stands_by,
        base="" if store else base,
        with_workers=not (store or claims.is_shared(source, workspace.claims)),
        node=node,
        claim_uid="" if store == "ephemeral" else claims.find_uid(workspace.claims, source.name),
    )
    return serve_pod(job, pod, source, store, number, defaults) if store else pod
