"""The setup: the job's own environment on its claim, made once for what it is made of."""

from datetime import datetime

from msgspec.structs import replace

from torchrun_api import names
from torchrun_api.core import Pod
from torchrun_controller.reconcile.model.conditions import Reason
from torchrun_controller.reconcile.model.observed import Defaults, Observed
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.objects.setup_pod import setup_pod
from torchrun_controller.reconcile.pods import waiting
from torchrun_controller.reconcile.pods.lifecycle import delete
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec
from torchrun_controller.reconcile.workspace import retry
from torchrun_controller.reconcile.workspace.preparation import SyncState, Workspace
from torchrun_controller.reconcile.workspace.retry import end_of

KEPT_SETUP_PODS = 2
# Ends that another try would only repeat.
PERMANENT = frozenset(
    {"SetupFailed", "WorkingDirMissing", "OOMKilled", "StartError", "ContainerCannotRun"}
)


def prepare(
    observed: Observed,
    run: ResolvedSpec,
    wanted: Environment,
    now: datetime,
    defaults: Defaults,
    ready: Workspace,
) -> Workspace:
    """Decide the next step towards the environment, now that the workspace is `ready`."""
    if not wanted.shared:
        words = f"{ready.why.message}; every worker runs the setup before its command"
        return replace(ready, why=Reason(ready.why.reason, words))
    if not observed.workspace.setup_pods:
        return _next_pod(observed, run, wanted, 0, defaults)
    latest = observed.workspace.setup_pods[-1]
    name, number = latest.metadata.name, names.number_of(latest.metadata.name)
    current = latest.metadata.annotations.setup_key == wanted.key
    if latest.metadata.terminating:
        return _waits(Reason("SetupPodEnding", f"pod {name} is being deleted"))
    match latest.status.phase:
        case "Succeeded" if current:
            return ready
        case "Failed" if current:
            return _after_failure(observed, run, wanted, latest, now, defaults)
        case "Succeeded" | "Failed":
            return _next_pod(observed, run, wanted, number + 1, defaults)
        case _ if not current:
            return Workspace(
                state=SyncState.SYNCING,
                why=Reason("Replacing", f"the setup has changed; pod {name} is being replaced"),
                deletes=(delete(latest),),
            )
        case _:
            return _waits(_why_running(observed, latest))


def _waits(why: Reason) -> Workspace:
    return Workspace(state=SyncState.SYNCING, why=why)


def _next_pod(
    observed: Observed, run: ResolvedSpec, wanted: Environment, number: int, defaults: Defaults
) -> Workspace:
    """One more setup pod; only the last few are kept."""
    assert observed.queue is not None
    pod = setup_pod(observed.job, observed.queue, run, wanted, number, defaults)
    return Workspace(
        state=SyncState.SYNCING,
        why=Reason("SetupRunning", "a setup pod is being made"),
        applies=(pod,),
        deletes=tuple(delete(pod) for pod in observed.workspace.setup_pods[: -KEPT_SETUP_PODS + 1]),
    )


def _after_failure(
    observed: Observed,
    run: ResolvedSpec,
    wanted: Environment,
    pod: Pod,
    now: datetime,
    defaults: Defaults,
) -> Workspace:
    """A command that failed waits for its mending; what came from outside is tried again."""
    end = end_of(pod, names.SETUP_CONTAINER)
    said = end.said
    text = f"pod {pod.metadata.name}: {said.message or said.reason or 'the setup failed'}"
    number = names.number_of(pod.metadata.name)
    if said.reason in PERMANENT:
        # Any change of the spec may be the mending, as one of env.
        if pod.metadata.annotations.generation != str(observed.job.metadata.generation):
            return _next_pod(observed, run, wanted, number + 1, defaults)
        mend = (
            "mend spec.setupCommand, spec.requirements or the workspace; to try the same again:"
            f" kubectl delete pod {pod.metadata.name}"
        )
        return Workspace(state=SyncState.REFUSED, why=Reason("SetupFailed", f"{text}; {mend}"))
    left = retry.left(pod, end, now)
    if left <= 0:
        return _next_pod(observed, run, wanted, number + 1, defaults)
    again = f"tried again {retry.delay(pod).total_seconds():.0f} s after the failure"
    reason = said.reason or "SetupFailed"
    return Workspace(
        state=SyncState.SYNCING, why=Reason(reason, f"{text}; {again}"), requeue_after=left
    )


def _why_running(observed: Observed, pod: Pod) -> Reason:
    name = pod.metadata.name
    if pod.status.phase == "Running":
        return Reason(
            "SetupRunning",
            f"pod {name} installs what the workers need; see: kubectl logs -f {name}",
        )
    why = waiting.of_pod(pod, observed.workspace.claims, observed.cluster.warnings)
    if why is None:
        return Reason("SetupRunning", f"pod {name} is starting")
    return Reason(why.reason, f"pod {name}: {why.message}")
