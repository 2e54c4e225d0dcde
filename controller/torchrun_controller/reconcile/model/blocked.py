"""Reasons of a waiting job that end only if a user or an administrator acts.

The alert TorchrunJobsBlocked names the same ones. Other waits end by themselves, as for quota or
nodes, or have an alert of their own, as WaitingForFence.
"""

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
