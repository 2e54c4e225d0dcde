"""Labels, annotations and finalizers of the project: objects, writers and readers of each.

The constants are in `names`. `make generate` writes docs/labels.md from here.
"""

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Literal, NamedTuple

from torchrun_api import names

# Writers and readers.
ADMINISTRATOR = "administrator"
CONTROLLER = "controller"
KUBERNETES = "Kubernetes"
LAUNCHER = "launcher"
PLUGIN = "plugin"
SDK = "SDK"
USER = "user"

Sort = Literal["label", "annotation", "finalizer"]

_PAGE = """# Labels and annotations

Select the objects of a job by their labels, and find out who writes an annotation. `make
generate` writes this page from `api/torchrun_api/generate/metadata_keys.py`.

Do not change the keys that the controller writes: it decides by them. Keys without a reader are
for your selectors, policies and dashboards. Pods of jobs also get the labels of `spec.labels` and
the annotations of `spec.annotations`.
"""


class MetadataKey(NamedTuple):
    """One key. objects: the kinds or pods that have it."""

    key: str
    sort: Sort
    objects: str
    written_by: tuple[str, ...]
    read_by: tuple[str, ...]
    meaning: str


def _label(
    key: str, objects: str, written_by: tuple[str, ...], read_by: tuple[str, ...], meaning: str
) -> MetadataKey:
    return MetadataKey(key, "label", objects, written_by, read_by, meaning)


def _annotation(
    key: str, objects: str, written_by: tuple[str, ...], read_by: tuple[str, ...], meaning: str
) -> MetadataKey:
    return MetadataKey(key, "annotation", objects, written_by, read_by, meaning)


_BY_CONTROLLER = (CONTROLLER,)

METADATA_KEYS = (
    _label(
        names.JOB_LABEL,
        "all objects of a job",
        _BY_CONTROLLER,
        (CONTROLLER, PLUGIN),
        "Name of the TorchrunJob.",
    ),
    _label(
        names.JOB_UID_LABEL,
        "all objects of a job",
        _BY_CONTROLLER,
        (CONTROLLER, PLUGIN),
        "UID of the TorchrunJob. Pods of a deleted job count for the quota of its queue until they "
        "end.",
    ),
    _label(
        names.QUEUE_LABEL,
        "all objects of a job",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Name of the TorchrunQueue, if it has at most 63 characters.",
    ),
    _label(
        names.ATTEMPT_LABEL,
        "child Job, worker, PodGroup",
        _BY_CONTROLLER,
        (CONTROLLER, PLUGIN, SDK),
        "Number of the attempt, from 0.",
    ),
    _label(
        names.ROLE_LABEL,
        "child Job, worker",
        _BY_CONTROLLER,
        (CONTROLLER, SDK),
        "`head` or `worker`, if the job has a head.",
    ),
    _label(
        names.COMPONENT_LABEL,
        "all objects of a job",
        _BY_CONTROLLER,
        (CONTROLLER, PLUGIN),
        "Purpose of the object: `worker`, `sync` (sync and serve pods), `setup`, `workspace`, "
        "`checkpoints`, `network`, `gang`, or `log-reader` (by the plugin).",
    ),
    _label(
        names.NAME_LABEL,
        "all objects of a job, KAI queue",
        _BY_CONTROLLER,
        (PLUGIN,),
        "Always `torchrun`.",
    ),
    _label(
        names.INSTANCE_LABEL,
        "all objects of a job",
        _BY_CONTROLLER,
        (PLUGIN,),
        "Name of the TorchrunJob.",
    ),
    _label(
        names.MANAGED_BY_LABEL,
        "all objects of a job, KAI queue",
        _BY_CONTROLLER,
        (),
        f"Always `{names.MANAGED_BY}`.",
    ),
    _label(
        names.COMPLETION_INDEX_LABEL,
        "worker",
        (KUBERNETES,),
        (CONTROLLER, PLUGIN, SDK),
        "Index of the pod in its Indexed Job.",
    ),
    _label(
        names.CONTROLLER_UID_LABEL,
        "worker",
        (KUBERNETES,),
        (CONTROLLER,),
        "UID of the Indexed Job. The pods of a gang that failed are deleted by it.",
    ),
    _label(
        names.RETAINED_LABEL,
        "PVC",
        _BY_CONTROLLER,
        (CONTROLLER, PLUGIN),
        "Name of the TorchrunJob whose PVC outlives it (`retain`). The PVC has no owner, and a new "
        "job of this name uses it again.",
    ),
    _label(
        names.GPU_TYPE_LABEL,
        "worker",
        _BY_CONTROLLER,
        (),
        "`nodeResources.gpuType` of the queue. For policies and dashboards.",
    ),
    _label(
        names.SDK_LABEL,
        "TorchrunJob",
        (SDK,),
        (SDK,),
        "Kind of the call: `pytorch`, `ray`, `function` or `app`.",
    ),
    _label(
        names.SDK_GANG_LABEL,
        "TorchrunJob",
        (SDK,),
        (SDK,),
        "Digest of the settings that a call must share with warm pods to use them again.",
    ),
    _label(
        names.SDK_RAY_LABEL,
        "pod of a RayCluster",
        (SDK,),
        (SDK,),
        "Name of the call whose Ray cluster KubeRay runs.",
    ),
    _annotation(
        names.WORKSPACE_SHA256,
        "TorchrunJob, sync pod",
        (PLUGIN, CONTROLLER),
        (CONTROLLER, PLUGIN),
        "Only an upload with this digest is accepted as the workspace.",
    ),
    _annotation(
        names.UPLOAD_TOKEN_SHA256,
        "TorchrunJob, sync pod",
        (PLUGIN, CONTROLLER),
        (CONTROLLER, PLUGIN),
        "Digest of the token with which any upload is accepted.",
    ),
    _annotation(
        names.WORKSPACE_BASE,
        "TorchrunJob, sync pod",
        (PLUGIN, CONTROLLER),
        (CONTROLLER,),
        "Another job, whose workspace the first upload may reuse.",
    ),
    _annotation(
        names.WORKSPACE_REVISION,
        "TorchrunJob",
        (PLUGIN,),
        (CONTROLLER,),
        "Revision that a sync pod has just completed, so that workers take it sooner.",
    ),
    _annotation(
        names.SYNC_REQUESTED,
        "TorchrunJob",
        (PLUGIN, USER),
        (CONTROLLER,),
        "A new value fetches a git or s3 workspace again.",
    ),
    _annotation(
        names.MACHINES_OFF,
        "TorchrunJob",
        (ADMINISTRATOR,),
        (CONTROLLER,),
        "Machines that are off and have no Node any more, as `ATTEMPT/MACHINE,...`. Their pods no "
        "longer count as running. See [lost machines](failures.md#lost-machines).",
    ),
    _annotation(
        names.SOURCE,
        "sync pod",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Digest of the source of the workspace.",
    ),
    _annotation(
        names.AFTER_REVISION,
        "sync pod",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "The pod accepts any upload with the token, as a revision later than this one.",
    ),
    _annotation(
        names.COMMIT, "sync pod", _BY_CONTROLLER, (CONTROLLER,), "The only content to accept."
    ),
    _annotation(
        names.DELIVERY,
        "serve pod",
        _BY_CONTROLLER,
        (CONTROLLER, PLUGIN),
        "Where the pod stores the workspace: `claim` (PVC) or `ephemeral`.",
    ),
    _annotation(
        names.CLAIM_NODE,
        "sync pod, serve pod",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "The only machine on which the pod may run: its PVC is mounted there.",
    ),
    _annotation(
        names.CLAIM_UID,
        "sync pod, serve pod, setup pod",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "UID of the workspace PVC that existed when the pod was created.",
    ),
    _annotation(
        names.FIRST_POD,
        "workspace PVC",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "The sync or serve pod that was created with the PVC.",
    ),
    _annotation(
        names.SETUP_KEY,
        "setup pod",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Digest of the content of the Python environment.",
    ),
    _annotation(
        names.GENERATION,
        "child Job, setup pod",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "`metadata.generation` of the job when the pod was created.",
    ),
    _annotation(
        names.RESTARTS,
        "child Job",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Attempts before this one that `maxRestarts` counts.",
    ),
    _annotation(
        names.DISRUPTIONS,
        "child Job",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Attempts before this one that it does not count.",
    ),
    _annotation(
        names.CAUSE,
        "child Job",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "How the attempt before this one ended, as JSON.",
    ),
    _annotation(
        names.STATE,
        "child Job",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Whether the workers share a state directory, which is used for fencing.",
    ),
    _annotation(
        names.LOCAL_CHECKPOINTS,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Size of the checkpoints on machines in bytes.",
    ),
    _annotation(
        names.WANTED_NODES,
        "child Job",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "`numNodes` of an elastic job whose gang has fewer nodes because some are missing.",
    ),
    _annotation(
        names.NODES,
        "child Job of a head",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "Number of nodes of the gang, including the head.",
    ),
    _annotation(
        names.GANG_SCHEDULER,
        "child Job",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "The [gang scheduler](schedulers.md) of the attempt.",
    ),
    _annotation(
        names.START,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, LAUNCHER),
        "Attempt whose ranks may start.",
    ),
    _annotation(
        names.GATE,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "`leader` if all nodes start their ranks once the worker of node 0 may start.",
    ),
    _annotation(
        names.FENCE,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, LAUNCHER),
        "Older workers on lost machines that the launcher fences before the ranks start.",
    ),
    _annotation(
        names.COMPLETE_CHECKPOINTS,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, LAUNCHER),
        "Complete checkpoints from which the ranks may resume, as JSON, the newest first.",
    ),
    _annotation(
        names.IN_PLACE,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, LAUNCHER),
        "On node 0, if its Job had another pod of node 0 before: the restarts in the same pods so "
        "far, and the number of the first round.",
    ),
    _annotation(
        names.REVISION,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, LAUNCHER, PLUGIN),
        "Revision of the workspace to run. Newer ones are written to the worker of node 0, which "
        "leads the others, and to every worker if a serve pod has the code.",
    ),
    _annotation(
        names.DEVELOPMENT,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, LAUNCHER, PLUGIN),
        "`true` if edits may follow, so a failed command waits for the next one.",
    ),
    _annotation(
        names.SERVED,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, LAUNCHER),
        "URL of the serve pod and digest of the manifest of that revision.",
    ),
    _annotation(
        names.NOTIFICATION_TIME,
        "worker",
        _BY_CONTROLLER,
        (CONTROLLER, PLUGIN),
        "Time of the last change of the annotations for the launcher, until they are written a "
        "second time.",
    ),
    _annotation(
        names.KAI_OWNER,
        "KAI queue",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "`NAMESPACE/NAME` of the TorchrunQueue.",
    ),
    MetadataKey(
        names.QUEUE_FINALIZER,
        "finalizer",
        "TorchrunQueue",
        _BY_CONTROLLER,
        (CONTROLLER,),
        "The queue remains until its jobs have no pods. See [deletion](queues.md#deletion).",
    ),
)

_SECTIONS: tuple[tuple[str, Sort], ...] = (
    ("Labels", "label"),
    ("Annotations", "annotation"),
    ("Finalizers", "finalizer"),
)


def page() -> str:
    """Return the reference as Markdown."""
    return _PAGE + "".join(_sections())


def _sections() -> Iterator[str]:
    for title, sort in _SECTIONS:
        yield f"\n## {title}\n\n| {sort} | objects | written by | read by | meaning |\n"
        yield "|---|---|---|---|---|\n"
        for key in METADATA_KEYS:
            if key.sort == sort:
                readers = ", ".join(key.read_by) or "-"
                writers = ", ".join(key.written_by)
                yield f"| `{key.key}` | {key.objects} | {writers} | {readers} | {key.meaning} |\n"


if __name__ == "__main__":
    Path(sys.argv[1]).write_text(page(), encoding="utf-8")
