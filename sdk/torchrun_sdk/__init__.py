"""Call a Python function on many nodes in Kubernetes.

    import torchrun_sdk as kt

    def train(lr): ...

    remote = kt.fn(train).to(kt.Compute(gpus=8)).distribute("pytorch", workers=4)
    losses = remote(lr=0.1)   # of all ranks, sorted by rank

It imports only the standard library, here and in the pods.
"""

from torchrun_sdk import distributed, images
from torchrun_sdk.apps import App, app
from torchrun_sdk.compute import Compute, Volume
from torchrun_sdk.errors import (
    CallError,
    CallTimeout,
    ClusterError,
    Detached,
    Evicted,
    IncompatiblePython,
    JobFailed,
    LaunchTimeout,
    OutOfMemory,
    ProtocolError,
    QuorumTimeout,
    RankExited,
    RemoteException,
    SdkError,
    UntrustedPickle,
    UsageError,
)
from torchrun_sdk.function import Remote, attach, compute, distribute, fn

__version__ = "0.1.0"

__all__ = [
    "App",
    "CallError",
    "CallTimeout",
    "ClusterError",
    "Compute",
    "Detached",
    "Evicted",
    "IncompatiblePython",
    "JobFailed",
    "LaunchTimeout",
    "OutOfMemory",
    "ProtocolError",
    "QuorumTimeout",
    "RankExited",
    "Remote",
    "RemoteException",
    "SdkError",
    "UntrustedPickle",
    "UsageError",
    "Volume",
    "app",
    "attach",
    "compute",
    "distribute",
    "distributed",
    "fn",
    "images",
]
