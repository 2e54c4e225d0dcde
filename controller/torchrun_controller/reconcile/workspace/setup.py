"""The setup pod: it installs the environment of a job on the PVC, once for each content."""

from datetime import datetime
from typing import ClassVar

import msgspec
from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.kinds.core import Pod
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.messages import sentence
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.model.plan import Delete
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.objects.setup_pod import setup_pod
from torchrun_controller.reconcile.pods import waiting
from torchrun_controller.reconcile.pods.lifecycle import delete_pod
from torchrun_controller.reconcile.pods.nodes import OUT_OF_SERVICE, NodeLoss, is_out_of_service
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec
from torchrun_controller.reconcile.workspace.claims import find_claim, find_uid, is_of_former_claim
from torchrun_controller.reconcile.workspace.delivery import (
    find_claim_nodes,
    is_misplaced,
    is_serve_pod,
)
from torchrun_controller.reconcile.workspace.helper_pods import (
    PodFailure,
    SyncMessage,
    SyncState,
    WorkspaceStep,
    create_replacement,
    delete_once,
    next_step,
    waiting_step,
)
from torchrun_controller.reconcile.workspace.sync_pods import end_pods

KEPT_SETUP_PODS = 2
# Failures that a retry would only repeat.
PERMANENT = frozenset(
    {"SetupFailed", "WorkingDirMissing", "OOMKilled", "StartError", "ContainerCannotRun"}
)


def prepare(
    observed: Observed,
    spec: ResolvedSpec,
    environment: Environment,
    now: datetime,
    defaults: Defaults,
    ready: WorkspaceStep,
) -> WorkspaceStep:
    """Decide the next step towards the environment, now that the workspace is `ready`."""
    if not environment.shared:
        message = f"{sentence(ready.why.message)} Each pod runs the setup before its command."
        return replace(ready, why=Reason(ready.why.reason, message))
    pods = SetupPods(observed, spec, environment, defaults, ready)
    step = next_step(pods, observed.cluster.nodes, now)
    return replace(step, deletes=(*step.deletes, *_end_misplaced_pods(observed, spec, now)))


def _end_misplaced_pods(
    observed: Observed, spec: ResolvedSpec, now: datetime
) -> tuple[Delete, ...]:
    """Delete sync pods that wait for newer code and keep the PVC from a setup pod's machine."""
    assert spec.workspace is not None, "an environment is shared on the PVC of the workspace"
    nodes = find_claim_nodes(observed, spec.workspace, "", now)
    pods = (pod for pod in observed.workspace.sync_pods if not is_serve_pod(pod))
    return end_pods(pod for pod in pods if is_misplaced(pod, nodes))


class SetupPods(msgspec.Struct, frozen=True):
    """Setup pods as helper pods. `ready` is the step that a finished setup returns."""

    observed: Observed
    spec: ResolvedSpec
    environment: Environment
    defaults: Defaults
    ready: WorkspaceStep

    container: ClassVar[str] = names.SETUP_CONTAINER

    @property
    def pods(self) -> tuple[Pod, ...]:
        """The setup pods of the job."""
        return self.observed.workspace.setup_pods

    def result(self) -> WorkspaceStep | None:
        """The ready workspace, once the latest pod has installed this environment."""
        if not self.pods:
            return None
        latest = self.pods[-1]
        is_done = latest.status.phase == "Succeeded" and not latest.metadata.terminating
        return self.ready if is_done and self.is_current(latest) else None

    def create_pod(self, number: int) -> WorkspaceStep:
        """Create one more setup pod; only the last few and the last successful one are kept."""
        successful = [
            pod
            for pod in self.pods
            if pod.status.phase == "Succeeded" and not self._has_former_claim(pod)
        ][-1:]
        oldest = self.pods[: -KEPT_SETUP_PODS + 1]
        job, queue = self.observed.job, self.observed.queue
        assert queue is not None
        claim_name = names.workspace_claim(job.metadata.name)
        claim_uid = find_uid(self.observed.workspace.claims, claim_name)
        pod = setup_pod(
            job, queue, self.spec, self.environment, number, self.defaults, claim_uid=claim_uid
        )
        return WorkspaceStep(
            state=SyncState.SYNCING,
            why=Reason("SetupRunning", "Creating a setup pod."),
            applies=(pod,),
            deletes=tuple(delete_pod(pod) for pod in oldest if pod not in successful),
        )

    def replace_pod(self, pod: Pod) -> WorkspaceStep:
        """Delete a pod that installs another environment, or that was created for a former PVC."""
        why = f"The setup or its PVC has changed. Replacing pod {pod.metadata.name}."
        return replace(waiting_step(Reason("Replacing", why)), deletes=(delete_pod(pod),))

    def replace_lost_pod(self, pod: Pod, loss: NodeLoss) -> WorkspaceStep:
        """Delete the pod. Create the next one only if the machine of this one is off.

        Two setup pods must not run at the same time: the second one removes the unfinished
        environments in the PVC.
        """
        name, node_name, cause = pod.metadata.name, pod.spec.node_name, loss.message
        node = (self.observed.cluster.nodes or {}).get(node_name)
        if node is not None and is_out_of_service(node):
            why = Reason("SetupPodLost", f"{cause} Replacing the pod.")
            return create_replacement(self, pod, why)
        if node is None:
            message = (
                f"{cause} The pod may still write to the workspace PVC. The next setup pod starts"
                " when Kubernetes has deleted this one. If the machine is off, you can run: kubectl"
                f" delete pod {name} -n {pod.metadata.namespace} --force"
            )
        else:
            message = (
                f"{cause} The pod may still run there and write to the workspace PVC. The next"
                " setup pod starts when the machine returns, or when you confirm that it is off"
                f" (kubectl taint nodes {node_name} {OUT_OF_SERVICE}=nodeshutdown:NoExecute)."
            )
        return replace(waiting_step(Reason("SetupPodLost", message)), deletes=delete_once(pod))

    def follow_pod(self, pod: Pod) -> WorkspaceStep:
        """Wait for the pod."""
        return waiting_step(self._why_running(pod))

    def _why_running(self, pod: Pod) -> Reason:
        name = pod.metadata.name
        if pod.status.phase == "Running":
            return Reason(
                "SetupRunning",
                f"Pod {name} is installing the environment. See: kubectl logs -f {name}",
            )
        claims, warnings = self.observed.workspace.claims, self.observed.cluster.warnings
        why = waiting.pod_reason(pod, claims, warnings)
        if why is None:
            return Reason("SetupRunning", f"Pod {name} is starting.")
        return Reason(why.reason, f"Pod {name}: {why.message}")

    def why_terminating(self, pod: Pod) -> Reason:
        """The next pod is created once this one is gone."""
        return Reason("Replacing", f"Waiting for pod {pod.metadata.name} to be deleted.")

    def is_current(self, pod: Pod) -> bool:
        """Whether the pod installs this environment, on the present PVC."""
        is_same = pod.metadata.annotations.setup_key == self.environment.key
        return is_same and not self._has_former_claim(pod)

    def _has_former_claim(self, pod: Pod) -> bool:
        claim_name = names.workspace_claim(self.observed.job.metadata.name)
        return is_of_former_claim(pod, find_claim(self.observed.workspace.claims, claim_name))

    def is_edited(self, pod: Pod) -> bool:
        """Whether the spec has changed since: any field may be the fix, as a variable of env."""
        return pod.metadata.annotations.generation != str(self.observed.job.metadata.generation)

    def failure(self, pod: Pod, message: SyncMessage) -> PodFailure:
        """The failure of the user's command is permanent; one from outside is not."""
        name = pod.metadata.name
        text = f"Pod {name}: {message.message or message.reason or 'the setup failed'}"
        if message.reason not in PERMANENT:
            return PodFailure(message.reason or "SetupFailed", text)
        remedy = (
            "Fix spec.setupCommand, spec.requirements or the workspace. To retry without a change,"
            f" run: kubectl delete pod {name}"
        )
        return PodFailure("SetupFailed", text, remedy)
