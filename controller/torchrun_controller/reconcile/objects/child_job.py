"""The Indexed Job of one attempt. The controller does not change it while its gang runs."""

import posixpath

from torchrun_api import names
from torchrun_api.contract import launch
from torchrun_api.contract.variable import env_vars
from torchrun_api.json import JsonObject, JsonValue, object_at, objects_at
from torchrun_api.kinds.job import EnvVar, TorchrunJob
from torchrun_api.kinds.quantity import amount_of
from torchrun_api.kinds.queue import TorchrunQueue
from torchrun_api.kinds.resources import JOBS
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects import environment as environments
from torchrun_controller.reconcile.objects import network, volumes
from torchrun_controller.reconcile.objects.base import (
    DO_NOT_EVICT,
    RESTRICTED_CONTAINER,
    labels,
    metadata,
    pull_secrets,
)
from torchrun_controller.reconcile.objects.environment import Environment
from torchrun_controller.reconcile.objects.security import apply_security
from torchrun_controller.reconcile.spec import pod_template
from torchrun_controller.reconcile.spec.merge import merge
from torchrun_controller.reconcile.spec.pod_template import set_launcher_resources
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec

# Seconds at the end of the grace period in which the launcher reports how its ranks ended.
REPORT_SECONDS = 5
# Audience of the workers' tokens. A stolen token is of no use for the API server.
AUDIENCE = "torchrun.ai/progress"
TOKEN_DIR = posixpath.dirname(launch.PROGRESS_TOKEN_FILE.default)
_TOKEN_SECONDS = 3600  # the kubelet renews it before it expires


def child_job(
    job: TorchrunJob,
    run: ResolvedSpec,
    attempt: int,
    template: JsonObject,
    annotations: JsonObject,
    role: str = "",
) -> Apply:
    """Return the Indexed Job of the gang, or the Job of its head or its workers, by `role`.

    The Job never retries, because torchrun does not recover from the death of an agent:
    backoffLimit 0, restartPolicy Never and no podFailurePolicy. `run` and the v1 PodTemplateSpec
    `template` are those of the pods of this role.
    """
    name_of = names.workers_job if role == names.WORKER else names.child_job
    meta = metadata(job, name_of(job.metadata.name, attempt), names.WORKER)
    meta["labels"] = _labels(job, attempt, role)
    if volumes.keeps_state(run):
        annotations = {**annotations, names.STATE: "true"}
    if role == names.HEAD:
        annotations = {**annotations, names.NODES: str(run.size.nodes)}
    meta["annotations"] = annotations
    pods = {names.HEAD: 1, names.WORKER: run.size.nodes - 1}.get(role, run.size.nodes)
    body: JsonObject = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": meta,
        "spec": {
            "completionMode": "Indexed",
            "completions": pods,
            "parallelism": pods,
            "backoffLimit": 0,
            "podReplacementPolicy": "Failed",
            "template": template,
        },
    }
    return Apply(JOBS, body)


def _labels(job: TorchrunJob, attempt: int, role: str) -> JsonObject:
    pod_labels = labels(job, names.WORKER) | {names.ATTEMPT_LABEL: str(attempt)}
    return pod_labels | {names.ROLE_LABEL: role} if role else pod_labels


def worker_template(
    job: TorchrunJob,
    queue: TorchrunQueue,
    run: ResolvedSpec,
    environment: Environment | None,
    attempt: int,
    start: str,
    defaults: Defaults,
    role: str = "",
    checkpoints: JsonObject | None = None,
) -> JsonObject:
    """Return the v1 PodTemplateSpec: the templates of the users, with the controller's fields.

    `checkpoints` is the annotation with the complete checkpoints, if there are any.

    Raises:
        InvalidSpecError: the job violates the podSecurity of its queue.
    """
    template: JsonObject = {
        "metadata": {"annotations": DO_NOT_EVICT},
        "spec": pod_template.defaults(queue),
    }
    layers = [queue.spec.pod_template, job.spec.pod_template]
    if job.spec.head is not None and role == names.HEAD:
        layers.append(job.spec.head.pod_template)
    for layer in layers:
        template = merge(template, {"metadata": layer.metadata, "spec": layer.spec})
    gpu_type = queue.spec.node_resources.gpu_type
    pod_labels: JsonObject = {
        **job.spec.labels,
        **({names.GPU_TYPE_LABEL: gpu_type} if gpu_type else {}),
        **_labels(job, attempt, role),
    }
    meta: JsonObject = {"labels": pod_labels}
    annotations: JsonObject = {**job.spec.annotations}
    if start:
        annotations[names.START] = start
    annotations.update(checkpoints or {})
    if network.needs_service(run):
        annotations[names.GATE] = names.LEADER
    if run.checkpoints is not None and run.checkpoints.host_path:
        annotations[names.LOCAL_CHECKPOINTS] = str(int(amount_of(run.checkpoints.size)))
    if annotations:
        meta["annotations"] = annotations
    pod = _pod(job, queue, run, environment, defaults)
    trainer = _trainer(job, queue, run, environment, attempt, defaults, role)
    pod["containers"] = [trainer]
    tolerations = object_at(template, "spec").get("tolerations")
    if isinstance(tolerations, list) and run.tolerations:
        pod["tolerations"] = [*tolerations, *run.tolerations]
    template = merge(template, {"metadata": meta, "spec": pod})
    if job.spec.head is not None and role == names.HEAD:
        template = merge(template, {"spec": pod_template.placement(job.spec.head.pod_template)})
    spec = object_at(template, "spec")
    _sort_variables(spec, trainer, job)
    set_launcher_resources(spec)
    return apply_security(template, queue)


def _sort_variables(pod: JsonObject, trainer: JsonObject, job: TorchrunJob) -> None:
    """Sort the variables of the merged trainer: the controller's, those of templates, spec.env.

    The kubelet expands `$(NAME)` in a value only if NAME comes before it, as TORCHRUN_JOB_NAME in
    `/runs/$(TORCHRUN_JOB_NAME)`.
    """
    users = {variable.name for variable in job.spec.env}
    ours = {variable["name"] for variable in objects_at(trainer, "env")} - users

    def place(variable: JsonObject) -> int:
        return 0 if variable["name"] in ours else 2 if variable["name"] in users else 1

    for container in objects_at(pod, "containers"):
        if container["name"] == names.TRAINER_CONTAINER:
            variables = objects_at(container, "env")
            container["env"] = [*sorted(variables, key=place)]


def _pod(
    job: TorchrunJob,
    queue: TorchrunQueue,
    run: ResolvedSpec,
    environment: Environment | None,
    defaults: Defaults,
) -> JsonObject:
    """Return the PodSpec without its training container."""
    spec = queue.spec
    pod: JsonObject = {
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": run.grace_seconds,
        "initContainers": [_launcher(defaults)],
        "volumes": [
            *volumes.volumes(job, run),
            *environments.volumes(environment),
            *_progress_volumes(defaults),
        ],
    }
    if network.needs_service(run):
        pod["subdomain"] = names.service(job.metadata.name)
    if spec.service_account_name:
        pod["serviceAccountName"] = spec.service_account_name
    optional: JsonObject = {
        "imagePullSecrets": pull_secrets(queue),
        "schedulerName": spec.scheduling.scheduler,
        "priorityClassName": run.priority_class_name,
        "nodeSelector": dict(run.node_selector),
        "tolerations": [dict(toleration) for toleration in run.tolerations],
        "affinity": run.affinity,
    }
    pod.update({name: value for name, value in optional.items() if value})
    if spec.networking.host_network:
        pod.update({"hostNetwork": True, "dnsPolicy": "ClusterFirstWithHostNet"})
    return pod


def _launcher(defaults: Defaults) -> JsonObject:
    """Return the init container that copies the launcher to an emptyDir for the user's image."""
    return {
        "name": names.LAUNCHER_CONTAINER,
        "image": defaults.runtime_image,
        "imagePullPolicy": defaults.runtime_image_pull_policy,
        "command": ["cp", "-r", "/opt/torchrun/launch", names.LAUNCHER],
        "securityContext": RESTRICTED_CONTAINER,
        "volumeMounts": [{"name": "torchrun", "mountPath": names.LAUNCHER_DIR}],
    }


def _trainer(
    job: TorchrunJob,
    queue: TorchrunQueue,
    run: ResolvedSpec,
    environment: Environment | None,
    attempt: int,
    defaults: Defaults,
    role: str,
) -> JsonObject:
    trainer: JsonObject = {
        "name": names.TRAINER_CONTAINER,
        "command": ["python3", names.LAUNCHER],
        "env": _env(job, run, environment, attempt, defaults, role),
        "volumeMounts": [
            *volumes.mounts(job, run),
            *environments.worker_mounts(environment),
            *_progress_mounts(defaults),
        ],
        "terminationMessagePolicy": "FallbackToLogsOnError",
    }
    if queue.spec.security_context is not None:
        trainer["securityContext"] = queue.spec.security_context
    trainer["image"] = run.image
    if queue.spec.image_pull_policy:
        trainer["imagePullPolicy"] = queue.spec.image_pull_policy
    resources: JsonObject = {}
    if run.size.requests:
        resources["requests"] = dict(run.size.requests)
    if run.size.limits:
        resources["limits"] = dict(run.size.limits)
    if resources:
        trainer["resources"] = resources
    return trainer


def _env(
    job: TorchrunJob,
    run: ResolvedSpec,
    environment: Environment | None,
    attempt: int,
    defaults: Defaults,
    role: str,
) -> list[JsonValue]:
    download = run.workspace.served if run.workspace else None
    copied_workspace = run.workspace if run.workspace and not run.workspace.existing else None
    target = copied_workspace.mount_path if copied_workspace else None
    own_env = [
        *env_vars(
            launch.JOB_NAME.env_var(job.metadata.name),
            launch.JOB_UID.env_var(job.metadata.uid),
            launch.ATTEMPT.env_var(attempt),
            launch.ROLE.env_var(role or None),
            launch.GRACE_SECONDS.env_var(max(run.grace_seconds - REPORT_SECONDS, 0)),
            launch.COMMAND.env_var(job.spec.command),
            launch.LAUNCHER_MODE.env_var_unless_default(job.spec.launcher),
            launch.BACKEND.env_var(run.backend),
            launch.CPUS.env_var_of_request("cpu"),
            launch.WORKING_DIR.env_var(run.working_dir if run.working_dir != target else None),
            launch.WORKSPACE_SOURCE.env_var(
                volumes.WORKSPACE_SOURCE_DIR if copied_workspace else None
            ),
            launch.WORKSPACE_URL.env_var(download.url if download else None),
            launch.WORKSPACE_MANIFEST.env_var(download.manifest if download else None),
            launch.WORKSPACE_TARGET.env_var(target),
            launch.STATE_DIR.env_var(volumes.STATE_DIR if volumes.keeps_state(run) else None),
            launch.CHECKPOINT_DIR.env_var(run.checkpoints.mount_path if run.checkpoints else None),
            launch.HANG_TIMEOUT_SECONDS.env_var(run.hang_seconds or None),
            launch.IN_PLACE_RESTARTS.env_var(run.restart_limits),
        ),
        *environments.worker_variables(environment),
        *_progress_variables(defaults),
        *network.rendezvous_env(job, run, attempt),
    ]
    # The controller refuses these names in a new job (`validation`).
    reserved_names = {variable["name"] for variable in own_env}
    users = (_variable(variable) for variable in job.spec.env)
    return [*own_env, *(entry for entry in users if entry["name"] not in reserved_names)]


def _variable(variable: EnvVar) -> JsonObject:
    if variable.value_from is not None:
        return {"name": variable.name, "valueFrom": variable.value_from}
    return {"name": variable.name, "value": variable.value or ""}


def _progress_variables(defaults: Defaults) -> list[JsonObject]:
    """Return the v1 EnvVars of a worker, none where the controller takes no reports."""
    if not defaults.progress_url:
        return []
    return env_vars(launch.PROGRESS_URL.env_var(defaults.progress_url))


def _progress_volumes(defaults: Defaults) -> list[JsonObject]:
    """Return the v1 Volume of the token that identifies the pod."""
    if not defaults.progress_url:
        return []
    token: JsonObject = {
        "audience": AUDIENCE,
        "expirationSeconds": _TOKEN_SECONDS,
        "path": "token",
    }
    sources: list[JsonObject] = [{"serviceAccountToken": token}]
    return [{"name": "progress-token", "projected": {"sources": [*sources]}}]


def _progress_mounts(defaults: Defaults) -> list[JsonObject]:
    """Return the v1 VolumeMount of the token."""
    if not defaults.progress_url:
        return []
    return [{"name": "progress-token", "mountPath": TOKEN_DIR, "readOnly": True}]
