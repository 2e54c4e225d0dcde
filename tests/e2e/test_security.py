"""Pods pass the Pod Security profiles that namespaces enforce; see also conftest's `space`."""

from e2e.conftest import PROFILE
from e2e.manifests import job, queue, zip_job
from e2e.space import Space
from torchrun_api.kinds import PODS


def test_restricted(space: Space):
    """The sync pod always passes; workers do where their queue says how."""
    space.kubectl("label", "namespace", space.name, "--overwrite", f"{PROFILE}=restricted")
    context = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    space.apply(
        queue("strict", space.cluster.controller, securityContext=context),
        zip_job("waits", "plain", "true"),
        job("runs", "strict", ["true"], 2),
    )
    space.wait_reason("waits", "WaitingForUpload")
    assert space.get(PODS, "waits-sync-0")["spec"]["automountServiceAccountToken"] is False
    space.wait_phase("runs", "Succeeded")
