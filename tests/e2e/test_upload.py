"""Uploads to the sync pod through the API server: cut, damaged, hostile and valid ones."""

import hashlib
import io
import re
import zipfile

import pytest

from e2e.manifests import zip_job
from e2e.space import Space
from e2e.sync_pod import TOKEN_SHA256, SyncPod, is_ready
from torchrun_api.json import object_at
from torchrun_api.kinds.resources import PODS, TORCHRUN_JOBS
from torchrun_api.names import UPLOAD_TOKEN_SHA256
from unit.runtime.hostile import HOSTILE, build

NOISE = hashlib.shake_256(b"noise").digest(3 << 20)
CHECK = (
    "import hashlib, sys;"
    f"sys.exit(hashlib.sha256(open('noise','rb').read()).hexdigest()"
    f" != '{hashlib.sha256(NOISE).hexdigest()}')"
)
RUN = ["python3", "-c", CHECK]
BOMB_BYTES = 1100 << 20


def good() -> bytes:
    """An incompressible archive that needs several pieces."""
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w") as archive:
        archive.writestr("noise", NOISE)
    return buffer.getvalue()


def bomb() -> bytes:
    """A zip bomb: about a megabyte that unpacks to more than a gigabyte."""
    buffer = io.BytesIO()
    with (
        zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED, compresslevel=1) as archive,
        archive.open("zeros", "w") as member,
    ):
        zeros = bytes(1 << 20)
        for _ in range(BOMB_BYTES >> 20):
            member.write(zeros)
    return buffer.getvalue()


def awaited(space: Space, name: str) -> SyncPod:
    """A job that accepts any upload with the token of this test, and its pod."""
    body = zip_job(name, "plain", RUN)
    object_at(body, "metadata")["annotations"] = {UPLOAD_TOKEN_SHA256: TOKEN_SHA256}
    space.apply(body)
    space.wait_reason(name, "WaitingForUpload")
    return SyncPod(space, f"{name}-sync-0")


def test_uploads_without_the_token_are_refused(space: Space):
    space.apply(zip_job("open", "plain", RUN))
    space.wait_reason("open", "WaitingForUpload")
    answer = SyncPod(space, "open-sync-0").put(good())
    assert (answer.status_code, answer.json()["reason"]) == (403, "UploadDenied")
    assert "torchrun.ai/workspace-sha256" in answer.json()["message"]


@pytest.mark.long
def test_refused_uploads_before_a_valid_one(space: Space):
    pod = awaited(space, "careful")

    wrong = pod.put(good(), sha256="0" * 64)
    assert wrong.status_code == 422
    assert wrong.json()["reason"] == "DigestMismatch"

    fine = {"a.py": b"print()"}
    reasons = {
        "parent": "InvalidFile",
        "absolute": "InvalidFile",
        "symlink": "InvalidFile",
        "wrong checksum": "InvalidArchive",
        "no zip": "InvalidArchive",
        "bomb": "CompressionRatio",
    }
    for name, reason in reasons.items():
        archive = bomb() if name == "bomb" else build(fine, HOSTILE[name], first=False)
        answer = pod.put(archive)
        assert answer.status_code == 202, (name, answer.text)
        body = pod.state_in("failed")
        assert body["reason"] == reason, (name, body)
        assert re.search(HOSTILE[name].words, body["message"]), (name, body)
    assert space.get(TORCHRUN_JOBS, "careful")["status"]["phase"] == "Syncing"

    assert pod.put(good()).status_code == 202
    assert pod.state_in("done", "failed")["state"] == "done"
    space.wait_phase("careful", "Succeeded")


@pytest.mark.long
def test_an_upload_resumes_at_the_offset(space: Space):
    archive, pod = good(), awaited(space, "cut")

    pod.cut(archive, start=0, after=1 << 20)
    pod.state_in("receiving")
    beyond = pod.put(archive, start=2 << 20)
    assert beyond.status_code == 409
    # Bytes sent before the cut may still be in flight through the API server.
    while (
        answer := pod.put(archive, held := beyond.json()["offset"], held + 1000)
    ).status_code == 409:
        beyond = answer
    assert 0 < held <= 1 << 20
    assert answer.json()["offset"] == held + 1000

    with space.history(PODS) as pods:
        first = pods.until(lambda p: p["metadata"]["uid"], name="cut-sync-0")
        space.kubectl("delete", "pod", "cut-sync-0", "--grace-period=1")
        pods.until(lambda p: p["metadata"]["uid"] != first and is_ready(p), name="cut-sync-0")
        assert pod.state()["offset"] == held + 1000
        assert pod.put(archive, held + 1000).status_code == 202
        assert pod.state_in("done", "failed")["state"] == "done"
        space.wait_phase("cut", "Succeeded")
        assert len(pods.uids()["cut-sync-0"]) == 2
