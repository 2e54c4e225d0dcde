"""The network of a gang: headless Service, NetworkPolicy, and the variables for the rendezvous."""

from torchrun_api import names
from torchrun_api.contract import launch
from torchrun_api.contract.variable import env_vars
from torchrun_api.json import JsonObject
from torchrun_api.kinds.job import TorchrunJob
from torchrun_api.kinds.resources import NETWORK_POLICIES, SECRETS, SERVICES
from torchrun_controller.reconcile.model.plan import Apply
from torchrun_controller.reconcile.objects.base import metadata
from torchrun_controller.reconcile.spec.resolve import ResolvedSpec

# Ports of rendezvous, which rounds use in turns; the port of the gang is the next one.
ROUND_PORTS = 16
HIGHEST_PORT = 65535
COMPLETION_INDEX_FIELD = "metadata.annotations['batch.kubernetes.io/job-completion-index']"


def needs_service(run: ResolvedSpec) -> bool:
    """Whether the gang needs a Service. A gang of one node uses localhost."""
    return run.size.nodes > 1


def service(job: TorchrunJob) -> Apply:
    """Return the headless Service. It resolves pods that are not ready: ranks rendezvous before."""
    return Apply(
        SERVICES,
        {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": metadata(job, names.service(job.metadata.name), names.NETWORK),
            "spec": {
                "clusterIP": "None",
                "publishNotReadyAddresses": True,
                "selector": {
                    names.JOB_LABEL: job.metadata.name,
                    names.COMPONENT_LABEL: names.WORKER,
                },
            },
        },
    )


def isolation(job: TorchrunJob) -> Apply:
    """Return the NetworkPolicy: only pods of the job may connect to its workers.

    Egress is not restricted. The policy is applied with each gang and deleted with the job.
    """
    job_labels: JsonObject = {names.JOB_LABEL: job.metadata.name}
    return Apply(
        NETWORK_POLICIES,
        {
            "apiVersion": NETWORK_POLICIES.api_version,
            "kind": NETWORK_POLICIES.kind,
            "metadata": metadata(job, job.metadata.name, names.NETWORK),
            "spec": {
                "podSelector": {"matchLabels": {**job_labels, names.COMPONENT_LABEL: names.WORKER}},
                "policyTypes": ["Ingress"],
                "ingress": [{"from": [{"podSelector": {"matchLabels": job_labels}}]}],
            },
        },
    )


def gang_secret(job: TorchrunJob) -> Apply:
    """Return the Secret of the job's gangs without its content: `Applier` adds a random key.

    Viewers read everything else of a job. It is created with each gang, if it does not exist, and
    deleted with the job.
    """
    name = names.gang_secret(job.metadata.name, job.metadata.uid)
    body: JsonObject = {
        "apiVersion": "v1",
        "kind": "Secret",
        "metadata": metadata(job, name, names.NETWORK),
        "immutable": True,
    }
    return Apply(SECRETS, body)


def rendezvous_env(job: TorchrunJob, run: ResolvedSpec, attempt: int) -> list[JsonObject]:
    """Return `PET_*`, which set options of torchrun.

    With these, and with what the launcher derives from them, a plain `torchrun train.py` forms the
    right group. Commands are never rewritten.
    """
    rendezvous = run.rendezvous
    master = (
        names.worker_host(job.metadata.name, attempt, 0, job.metadata.namespace)
        if needs_service(run)
        else "localhost"
    )
    port = rendezvous.port
    secret = names.gang_secret(job.metadata.name, job.metadata.uid)
    gang_key = launch.GANG_KEY.env_var_of_secret(secret, names.GANG_KEY)
    return env_vars(
        launch.GANG_PORT.env_var(_gang_port(port) if needs_service(run) else None),
        gang_key if needs_service(run) else None,
        launch.PET_NNODES.env_var(run.size.nodes),
        launch.PET_NPROC_PER_NODE.env_var(run.nproc_per_node),
        launch.PET_RDZV_BACKEND.env_var_unless_default(rendezvous.backend),
        launch.PET_RDZV_ENDPOINT.env_var(rendezvous.endpoint or None),
        launch.PET_MAX_RESTARTS.env_var_unless_default(run.max_restarts),
        launch.PET_MASTER_ADDR.env_var(master),
        launch.PET_MASTER_PORT.env_var(port),
        launch.NODE_RANK.env_var_of_field(COMPLETION_INDEX_FIELD),
    )


def _gang_port(port: int) -> int:
    """Return the port of the leader, which no round uses for its rendezvous."""
    return port + ROUND_PORTS if port + ROUND_PORTS <= HIGHEST_PORT else port - 1
