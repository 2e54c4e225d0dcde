"""kwok: simulated nodes and containers."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from torchrun_cluster import LocalCluster, binaries

STAGES = Path(__file__).with_name("kwok.yaml")


@contextmanager
def playing(
    cluster: LocalCluster, folder: Path, *arguments: str, stages: tuple[Path, ...] = (STAGES,)
) -> Iterator[None]:
    """Run kwok. `arguments` select the nodes; its log is in `folder`."""
    command = [
        *(str(binaries.ensure(["kwok"])["kwok"]), "--kubeconfig", str(cluster.kubeconfig)),
        *(word for path in stages for word in ("--config", str(path))),
        *arguments,
    ]
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
        try:
            yield
        finally:
            process.terminate()
            process.wait(120)
