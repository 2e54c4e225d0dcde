"""The rules for new jobs. A job that breaks one is not started; its condition has the message.

They apply to each spec before its first gang, and to an edit of a spec before the next gang. A gang
that runs, its restarts, a reload and a queue are never refused by a rule, which may come with a new
version of the controller: they use `resolve`, which does not raise.
"""

import math
from collections.abc import Iterator

from torchrun_api import names
from torchrun_api.kinds.gang_schedulers import GANG_SCHEDULERS
from torchrun_api.kinds.job import JobNodeResources, TorchrunJob, TorchrunJobSpec
from torchrun_api.kinds.quantity import QuantityError, amount_of, parse
from torchrun_api.kinds.queue import NodeResources, TorchrunQueue, TorchrunQueueSpec
from torchrun_api.kinds.reliability import FailureRule, Reliability
from torchrun_controller.reconcile.spec import pod_template
from torchrun_controller.reconcile.spec.errors import InvalidSpecError
from torchrun_controller.reconcile.spec.reliability import resolve_reliability
from torchrun_controller.reconcile.spec.requests import check_templates
from torchrun_controller.reconcile.spec.resolve import image_of
from torchrun_controller.reconcile.spec.size import Size, gpus_of, node_resources, size_of, spread

# The limit of a queue that sets none.
DEFAULT_MAX_GRACE_SECONDS = 3600


def validate(job: TorchrunJob, queue: TorchrunQueue) -> None:
    """Check a job and its queue against all rules.

    Raises:
        InvalidSpecError: a rule is broken. The message names the field, its value and what to do.
    """
    spec, policy = job.spec, resolve_reliability(job, queue)
    problem = (
        _check_quantities(job, queue)
        or _check_size(spec, queue.spec)
        or _check_command(spec)
        or _check_env(spec)
        or _check_image(spec, queue)
        or _check_workspace(spec, queue)
        or _over_limit(size_of(spec, queue.spec).nodes, policy.max_nodes, queue)
        or _over_grace(policy.grace_seconds, queue)
        or _over_priority(spec, queue)
        or _contradiction(spec, queue, never_restarts=policy.never_restart)
        or _check_rules(policy.rules)
    )
    if problem is not None:
        raise InvalidSpecError(problem)
    pod_template.check(queue, job)
    check_templates(job, queue)


def _check_quantities(job: TorchrunJob, queue: TorchrunQueue) -> str | None:
    """Return why a quantity of job or queue cannot be read. The schemas refuse most of these."""
    try:
        for quantity in _quantities(job.spec, queue):
            parse(quantity)
    except QuantityError as error:
        return str(error)
    return None


def _quantities(spec: TorchrunJobSpec, queue: TorchrunQueue) -> Iterator[int | str]:
    storage, volumes, head = queue.spec.storage, spec.volumes, spec.head
    resources = (queue.spec.node_resources, spec.node_resources)
    heads = () if head is None else (head.node_resources,)
    claims = (storage.workspace, storage.checkpoints, volumes.checkpoints)
    quantities = (
        *(value for r in (*resources, *heads) for value in (r.cpus, r.memory)),
        *(value for c in claims if c is not None for value in (c.size, c.size_per_gpu)),
        volumes.workspace.size if volumes.workspace is not None else None,
        storage.shm_size_per_gpu,
    )
    return (value for value in quantities if value is not None)


def _check_size(spec: TorchrunJobSpec, queue: TorchrunQueueSpec) -> str | None:
    """Return why the spec has no size, or one that no node of the queue has."""
    if (spec.num_nodes is None) == (spec.num_gpus is None):
        return "Set exactly one of spec.numNodes and spec.numGPUs."
    most = node_resources(queue, spec.pod_template)
    problem = _over_node("spec.nodeResources", spec.node_resources, most)
    if problem is None and spec.head is not None:
        most_of_head = node_resources(queue, spec.pod_template, spec.head.pod_template)
        problem = _over_node("spec.head.nodeResources", spec.head.node_resources, most_of_head)
    if problem is None and spec.num_gpus is not None:
        problem = _check_gpus(spec.num_gpus, gpus_of(spec.node_resources, most))
    return problem or _check_resources(spec, size_of(spec, queue))


def _check_resources(spec: TorchrunJobSpec, size: Size) -> str | None:
    """Return which resource of the job's podTemplate has no effect beside nodeResources."""
    resources = {"requests": size.requests, "limits": size.limits}
    for kind, amounts in resources.items():
        for name, amount in amounts.items():
            value = pod_template.trainer_resource((spec.pod_template,), name, (kind,))
            if value is not None and amount_of(value) != amount_of(amount):
                return (
                    f"spec.podTemplate requests {value} of {name} for the container trainer, but"
                    f" nodeResources of the job or its queue sets {amount}. Set"
                    " spec.nodeResources, and remove it from spec.podTemplate."
                )
    return None


def _over_node(
    path: str, resources: JobNodeResources, queue_resources: NodeResources
) -> str | None:
    """Return the first resource of which a node of the queue has less than the job requests."""
    pairs = (
        ("gpus", resources.gpus, queue_resources.gpus),
        ("cpus", resources.cpus, queue_resources.cpus),
        ("memory", resources.memory, queue_resources.memory),
    )
    for field, value, most in pairs:
        if value is not None and most is not None and parse(value) > parse(most):
            return (
                f"{path}.{field} is {value}, but nodeResources.{field} of the queue is {most}."
                f" Request at most {most} or choose another queue."
            )
    return None


def _check_gpus(gpus: int, per_node: int) -> str | None:
    """Return why this number of GPUs cannot be spread over nodes."""
    if per_node == 0:
        return (
            f"spec.numGPUs is {gpus}, but nodeResources.gpus of the queue is 0. Set numNodes"
            " instead or choose another queue."
        )
    nodes, _ = spread(gpus, per_node)
    if nodes > names.MOST_NODES:
        return (
            f"spec.numGPUs {gpus} with up to {per_node} GPUs on each node is {nodes} nodes. A job"
            f" has at most {names.MOST_NODES}. Request fewer GPUs or choose another queue."
        )
    if gpus % nodes == 0:
        return None
    below = next(n for n in range(gpus - 1, 0, -1) if n % math.ceil(n / per_node) == 0)
    above = next(n for n in range(gpus + 1, 2 * gpus) if n % math.ceil(n / per_node) == 0)
    return (
        f"spec.numGPUs {gpus} does not divide evenly among {nodes} nodes with up to {per_node}"
        f" GPUs each. Use {below} or {above}."
    )


def _check_command(spec: TorchrunJobSpec) -> str | None:
    if spec.command:
        return None
    return 'spec.command is empty. Set it to a shell command line such as "python train.py".'


def _check_env(spec: TorchrunJobSpec) -> str | None:
    for variable in spec.env:
        if variable.name in pod_template.RESERVED:
            return (
                f"spec.env contains {variable.name}, which the controller sets. Remove it (sizes,"
                " ports and backends have their own fields)."
            )
    return None


def _check_image(spec: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    if image_of(spec, queue.spec):
        return None
    return (
        "spec.image is not set, and the queue has no default image. Set it in the job or in its"
        " queue."
    )


def _check_workspace(spec: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    """Return why the job can have no workspace in this queue; one from a claim always can."""
    workspace, storage = spec.volumes.workspace, queue.spec.storage.workspace
    if workspace is None or not workspace.enabled or storage is None or storage.enabled:
        return None
    if workspace.source == "none" or (workspace.source == "existing" and workspace.claim_name):
        return None
    return (
        "spec.volumes.workspace is set, but storage.workspace.enabled of the queue is false."
        " Set source to none or choose another queue."
    )


def _check_rules(rules: tuple[FailureRule, ...]) -> str | None:
    """Return which rule can never match because of earlier ones."""
    codes: set[int] = set()
    signals: set[int] = set()
    conditions: set[str] = set()
    for index, rule in enumerate(rules):
        first_matches = (
            set(rule.exit_codes) - codes
            or set(rule.signals) - signals
            or set(rule.pod_conditions) - conditions
        )
        if not first_matches:
            return (
                f"reliability.rules[{index}] can never match: earlier rules match everything that"
                " it lists. Remove it or move it to the front."
            )
        codes |= set(rule.exit_codes)
        signals |= set(rule.signals)
        conditions |= set(rule.pod_conditions)
    return None


def _contradiction(
    spec: TorchrunJobSpec, queue: TorchrunQueue, *, never_restarts: bool
) -> str | None:
    """Return the first contradiction of the job and its queue, with both fields and what to do.

    A job's value overrides its queue's, so only different fields can contradict each other.
    `never_restarts` is from the settings at the start of the job. The queue may have others now.
    """
    of_queue = f"of TorchrunQueue {queue.metadata.name}"
    backend = spec.distributed.rdzv_backend or queue.spec.distributed.rdzv_backend
    if spec.elastic is not None and backend == "static":
        return (
            f"spec.elastic conflicts with distributed.rdzvBackend static {of_queue}. Set"
            " spec.distributed.rdzvBackend to c10d."
        )
    if spec.head is not None:
        problem = _check_head(spec, queue)
        if problem is not None:
            return problem
    restart_field = _restart_field(spec.reliability)
    queue_forbids = never_restarts and spec.reliability.restart_policy is None
    if restart_field is not None and queue_forbids:
        return (
            f"{restart_field} conflicts with reliability.restartPolicy Never {of_queue}. Set"
            " spec.reliability.restartPolicy to OnFailure."
        )
    return None


def _check_head(spec: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    """Return why a job of this queue cannot have a head."""
    if spec.elastic is not None:
        return (
            "spec.head conflicts with spec.elastic: a gang with a head has a fixed size. Remove"
            " one of the two fields."
        )
    if (spec.num_nodes or 0) < 2:
        return (
            "spec.head requires spec.numNodes of at least 2: the head and its workers. Increase"
            " spec.numNodes or remove spec.head."
        )
    gang = queue.spec.scheduling.gang
    if gang is not None and GANG_SCHEDULERS[gang].admits_jobs:
        return (
            f"spec.head conflicts with scheduling.gang {gang} of TorchrunQueue"
            f" {queue.metadata.name}: {GANG_SCHEDULERS[gang].title} admits each Job separately, and"
            " a gang with a head has two. Remove spec.head or choose another queue."
        )
    return None


def _over_limit(nodes: int, most: int | None, queue: TorchrunQueue) -> str | None:
    """Return a message if the gang has more nodes than the queue allows."""
    if most is None or nodes <= most:
        return None
    return (
        f"The job requests {nodes} nodes, but limits.maxNodesPerJob of TorchrunQueue"
        f" {queue.metadata.name} is {most}. Request fewer nodes or choose another queue."
    )


def _over_grace(grace_seconds: int, queue: TorchrunQueue) -> str | None:
    """Return a message if stopped pods would keep their machines longer than the queue allows."""
    limit = queue.spec.limits.max_termination_grace_period_seconds
    most = DEFAULT_MAX_GRACE_SECONDS if limit is None else limit
    if grace_seconds <= most:
        return None
    return (
        f"The grace period of the pods is {grace_seconds} s, but"
        f" limits.maxTerminationGracePeriodSeconds of TorchrunQueue {queue.metadata.name} is"
        f" {most}. Lower reliability.terminationGracePeriodSeconds, also in podTemplate, or choose"
        " another queue."
    )


def _over_priority(job: TorchrunJobSpec, queue: TorchrunQueue) -> str | None:
    """Return a message if the priority is above what the queue allows."""
    most = queue.spec.limits.max_priority
    if most is None or job.priority is None or job.priority <= most:
        return None
    return (
        f"spec.priority is {job.priority}, but limits.maxPriority of TorchrunQueue"
        f" {queue.metadata.name} is {most}. Lower spec.priority or choose another queue."
    )


def _restart_field(reliability: Reliability) -> str | None:
    """Return the first field of the job that allows restarts."""
    if reliability.max_restarts:
        return f"spec.reliability.maxRestarts {reliability.max_restarts}"
    for index, rule in enumerate(reliability.rules or ()):
        if rule.action != "fail":
            return f"spec.reliability.rules[{index}].action {rule.action}"
    return None
