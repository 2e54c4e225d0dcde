"""kwok: simulated nodes and containers."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrun_cluster import LocalCluster, binaries

STAGES = Path(__file__).with_name("kwok.yaml")


@contextmanager
def playing(
    cluster: LocalCluster,
    folder: Path,
    *arguments: str,
    stages: tuple[Path, ...] = (STAGES,),
    lease_seconds: int = 40,
) -> Iterator[None]:
    """Run kwok. `arguments` select the nodes; its log is in `folder`.

    Without leases, the nodes would be NotReady for a moment every 50 s, and a pod that is deleted
    at that moment has to be fenced.
    """
    command = [
        *(str(binaries.ensure(["kwok"])["kwok"]), "--kubeconfig", str(cluster.kubeconfig)),
        *(word for path in stages for word in ("--config", str(path))),
        *("--node-lease-duration-seconds", str(lease_seconds)),
        *arguments,
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(120)
