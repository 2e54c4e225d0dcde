"""`run.py` in the workspace: a rank; `call FILE` for one call; `collect CALL` for a client.

`call FILE ROOT` runs it with another directory than the workspace.
"""

from __future__ import annotations

import sys
from pathlib import Path


def main(arguments: list[str], folder: Path) -> int:
    """The exit code. `folder` is FOLDER of the workspace."""
    if arguments[:1] == ["collect"]:
        from torchrun_sdk.worker.collect import collect

        return collect(folder, arguments[1])
    from torchrun_sdk.worker.rank import run, run_one

    return run_one(folder, *map(Path, arguments[1:])) if arguments[:1] == ["call"] else run(folder)


if __name__ == "__main__":
    here = Path(__file__).resolve().parents[2]
    sys.exit(main(sys.argv[1:], here))
