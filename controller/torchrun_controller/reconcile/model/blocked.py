"""Reasons of a waiting job that end only if a user or an administrator acts.

The alert TorchrunJobsBlocked has the same ones. Other waits end by themselves, as for quota or
nodes, or have an alert of their own, as WaitingForFence.
"""

from torchrun_controller.reconcile.model.conditions import Reason

_SPEC_AND_QUEUE = (
    *("QueueNotFound", "QueueTerminating", "InvalidSpec", "NameConflict", "Rejected"),
    *("GangSchedulerMissing", "DependencyNotFound", "OrphanedWorkers"),
    "StartTimeout",
)
_PODS = (
    *("PodSecurity", "PodsRefused", "SchedulerError", "ImagePullFailed", "VolumeNotMounted"),
    *("ProvisioningFailed", "NoStorageClass", "ClaimNotFound"),
    # The kubelet's reasons.
    *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
)
_WORKSPACE = (
    *("SecretNotFound", "SecretInvalid", "AccessDenied", "HostKeyMismatch", "CertificateInvalid"),
    *("SourceNotFound", "InvalidSource", "InvalidSetting", "ForbiddenAddress", "Redirected"),
    *("WrongRegion", "ClockSkew", "GitMissing", "InvalidFile", "EmptyWorkspace", "InvalidArchive"),
    *("CompressionRatio", "WorkspaceFull", "WorkspaceTooLarge", "WorkspaceNotWritable"),
    "SetupFailed",
)
BLOCKED_REASONS = frozenset((*_SPEC_AND_QUEUE, *_PODS, *_WORKSPACE))


def linked(why: Reason, docs_url: str) -> Reason:
    """Return the reason with a link to its explanation, if somebody has to act.

    `docs_url` is the site that `make docs` builds, whose anchors docs/conf.py sets; "" for none.
    """
    if not docs_url or why.reason not in BLOCKED_REASONS:
        return why
    page = f"{docs_url}/docs/troubleshooting.html#reason-{why.reason.lower()}"
    return Reason(why.reason, f"{why.message} {page}")
