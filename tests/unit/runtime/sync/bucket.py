"""The files of a bucket, and the result of a fetch from it."""

import pytest

from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.errors import SyncError
from torchrun_runtime.sync.fetch import fetch
from torchrun_runtime.sync.settings import SyncSettings

BIG = bytes(range(256)) * 12_000
FILES = {"code/train.py": b"print()", "code/pkg/a b+c.py": b"1", "code/big": BIG, "code/none": b""}


def tree(settings: SyncSettings) -> dict[str, bytes]:
    marker = fetch(settings)
    root = Claim(settings.directory).tree(marker.revision)
    files = (path for path in root.rglob("*") if path.is_file())
    return {f"code/{path.relative_to(root)}": path.read_bytes() for path in files}


def failure(settings: SyncSettings) -> SyncError:
    with pytest.raises(SyncError) as caught:
        fetch(settings)
    assert Claim(settings.directory).marker() is None
    assert {path.name for path in settings.directory.iterdir()} <= {"state"}
    return caught.value
