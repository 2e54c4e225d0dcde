"""The termination message fits into what the kubelet keeps."""

import json
from pathlib import Path

import pytest

from torchrun_runtime.sync.report import terminate_with

KUBELET_BYTES = 4096


@pytest.mark.parametrize("character", ["a", '"', "\n", "\x01", "é", "日", "🙂", "\udc80"])
def test_a_long_message_stays_json(tmp_path: Path, character: str) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    terminate_with(path, {"reason": "FetchFailed", "message": "Cause: " + character * 5000})
    content = path.read_bytes()
    assert 1500 < len(content) <= KUBELET_BYTES
    message = json.loads(content)
    assert message["reason"] == "FetchFailed"
    assert message["message"].startswith("Cause: ")


def test_a_short_message_is_kept(tmp_path: Path) -> None:
    path = tmp_path / "termination-log"
    path.touch()
    terminate_with(path, {"message": '日本 🙂 "quoted"', "permanent": True})
    assert json.loads(path.read_bytes()) == {"message": '日本 🙂 "quoted"', "permanent": True}
