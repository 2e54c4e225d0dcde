"""kubectl as the cluster's administrator."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

from .errors import ClusterError
from .processes import without_marks
from .state import State


def run(
    program: Path,
    cluster: State,
    arguments: Sequence[str],
    stdin: str | None,
    timeout: float,
    *,
    check: bool,
) -> subprocess.CompletedProcess[str]:
    """Run it; raises ClusterError after `timeout` seconds, and with its stderr if `check`."""
    environment = {
        **without_marks(os.environ),
        "KUBECONFIG": str(cluster.kubeconfig),
        "KUBECACHEDIR": str(cluster.folder / "kubectl-cache"),
    }
    line = f"kubectl {' '.join(arguments)}"
    try:
        result = subprocess.run(
            [str(program), *arguments],
            env=environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=timeout,
            check=False,
        )
    except subprocess.TimeoutExpired as error:
        raise ClusterError(f"{line}: no end within {timeout:.0f} s") from error
    if check and result.returncode:
        raise ClusterError(f"{line}: {result.stderr.strip()}")
    return result
