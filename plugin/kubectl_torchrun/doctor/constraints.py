"""Security context constraints of OpenShift: whether they accept the pods of jobs.

The launcher of each worker and the sync and serve pods run as user 65532. The constraint
restricted-v2, which every service account may use, accepts only user ids of the range of the
namespace.
"""

from kubectl_torchrun.doctor.findings import Finding, text_at, words_at
from kubectl_torchrun.doctor.snapshot import ClusterSnapshot

GROUP = "security.openshift.io"
_ROOT = ("anyuid", "privileged")
CONSTRAINTS = ("nonroot-v2", "nonroot", *_ROOT)


def constraints_key(account: str) -> str:
    """The name of the response with the constraints that a service account may use."""
    return f"constraints of {account}"


def service_accounts(snapshot: ClusterSnapshot) -> list[str]:
    """The service accounts of the workers of all queues, each once."""
    return sorted(
        {text_at(queue, "spec", "serviceAccountName") or "default" for queue in snapshot.queues()}
    )


def check_constraints(snapshot: ClusterSnapshot) -> list[Finding]:
    """Whether each service account may use a constraint for user 65532, and for root."""
    if GROUP not in snapshot.groups():
        return []
    findings = []
    for account in service_accounts(snapshot):
        usable = words_at(snapshot.read(constraints_key(account)), "constraints")
        if not usable:
            text = (
                f"Service account {account} may not use nonroot-v2. The launcher runs as user"
                " 65532, which restricted-v2 refuses, so jobs get no pods (PodsRefused)"
            )
            fix = (
                f"oc adm policy add-scc-to-user nonroot-v2 -z {account} -n {snapshot.namespace};"
                " anyuid if training runs as root"
            )
            findings.append(Finding("fail", "admission", text, fix))
        elif not set(usable) & set(_ROOT):
            text = f"Service account {account} may use {usable[0]}: training cannot run as root"
            fix = f"For images that need root: oc adm policy add-scc-to-user anyuid -z {account}"
            findings.append(Finding("note", "admission", text, fix))
        else:
            text = f"Service account {account} may use {', '.join(usable)}"
            findings.append(Finding("ok", "admission", text))
    return findings
