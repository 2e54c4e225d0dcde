"""Pods pass the Pod Security profiles that namespaces enforce; see also conftest's `space`."""

from e2e.conftest import PROFILE
from e2e.manifests import queue, zip_job
from e2e.space import Space
from torchrun_api.kinds import PODS


def test_sync_pod_passes_restricted(space: Space):
    space.kubectl("label", "namespace", space.name, "--overwrite", f"{PROFILE}=restricted")
    space.apply(zip_job("strict", "plain", "true"))
    space.wait_reason("strict", "WaitingForUpload")
    pod = space.get(PODS, "strict-sync-0")
    assert pod["spec"]["automountServiceAccountToken"] is False


def test_workers_pass_restricted_under_a_queue_that_says_so(space: Space):
    space.kubectl("label", "namespace", space.name, "--overwrite", f"{PROFILE}=restricted")
    context = {
        "runAsNonRoot": True,
        "runAsUser": 65532,
        "allowPrivilegeEscalation": False,
        "capabilities": {"drop": ["ALL"]},
        "seccompProfile": {"type": "RuntimeDefault"},
    }
    space.apply(queue("strict", space.cluster.controller, securityContext=context))
    space.apply(zip_job("strict", "strict", ["true"]))
    space.wait_reason("strict", "WaitingForUpload")
