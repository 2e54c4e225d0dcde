"""An upload in pieces: it resumes after any cut, and detects every wrong byte."""

import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from profiles import examples
from torchrun_runtime.sync.errors import UploadError
from torchrun_runtime.sync.upload import Identity, ReceivedUpload
from unit.runtime.syncing import digest

LIMIT = 1 << 20


def identity(data: bytes) -> Identity:
    return Identity(digest(data), len(data))


def status(error: "pytest.ExceptionInfo[UploadError]") -> tuple[int, int | None]:
    return error.value.status, error.value.offset


@given(data=st.binary(min_size=1, max_size=300), steps=st.data())
@examples(150)
def test_an_upload_cut_anywhere_is_finished_by_the_next_pods(
    data: bytes, steps: st.DataObject
) -> None:
    with tempfile.TemporaryDirectory() as name:
        upload = ReceivedUpload(Path(name), LIMIT)
        while not upload.complete:
            assert upload.archive.exists() or upload.offset == 0
            writer = upload.begin(identity(data), upload.offset)
            until = min(upload.offset + steps.draw(st.integers(1, 300)), len(data))
            upload.append(writer, data[upload.offset : until])
            match steps.draw(st.sampled_from(["go on", "cut", "new pod"])):
                case "new pod":
                    upload = ReceivedUpload(Path(name), LIMIT)
                case "go on":
                    finished = upload.finish(writer)
                    assert finished == (until == len(data))
            assert upload.offset == until
        assert upload.archive.read_bytes() == data
        assert ReceivedUpload(Path(name), LIMIT).complete


@given(
    data=st.binary(min_size=2, max_size=100),
    at=st.integers(0, 99),
    cut=st.integers(0, 100),
    flip=st.integers(1, 255),
)
@examples(100)
def test_a_wrong_byte_is_detected_after_a_restart(
    data: bytes, at: int, cut: int, flip: int
) -> None:
    wrong = bytearray(data)
    wrong[at % len(data)] ^= flip
    cut = min(cut, len(data))
    with tempfile.TemporaryDirectory() as name:
        first = ReceivedUpload(Path(name), LIMIT)
        first.append(first.begin(identity(data), 0), bytes(wrong[:cut]))
        second = ReceivedUpload(Path(name), LIMIT)
        if second.offset == 0:
            cut = 0
        writer = second.begin(identity(data), cut)
        second.append(writer, bytes(wrong[cut:]))
        with pytest.raises(UploadError) as error:
            second.finish(writer)
        assert status(error) == (422, 0)
        assert (second.identity, second.offset, second.archive.exists()) == (None, 0, False)


def test_resumes_only_at_the_offset(tmp_path: Path) -> None:
    upload = ReceivedUpload(tmp_path, LIMIT)
    upload.append(upload.begin(identity(b"abcdef"), 0), b"abc")
    for start in (0, 2, 4):
        with pytest.raises(UploadError) as error:
            upload.begin(identity(b"abcdef"), start)
        assert status(error) == (409, 3)


def test_another_archive_replaces_the_upload_and_starts_at_zero(tmp_path: Path) -> None:
    upload = ReceivedUpload(tmp_path, LIMIT)
    upload.append(upload.begin(identity(b"abcdef"), 0), b"abc")
    with pytest.raises(UploadError) as error:
        upload.begin(identity(b"uvwxyz"), 3)
    assert status(error) == (409, 0)
    assert upload.offset == 3
    writer = upload.begin(identity(b"uvwxyz"), 0)
    assert upload.offset == 0
    upload.append(writer, b"uvwxyz")
    assert upload.finish(writer)
    assert upload.archive.read_bytes() == b"uvwxyz"


def test_a_newer_writer_takes_over(tmp_path: Path) -> None:
    upload = ReceivedUpload(tmp_path, LIMIT)
    old = upload.begin(identity(b"abcdef"), 0)
    upload.append(old, b"abc")
    new = upload.begin(identity(b"abcdef"), 3)
    with pytest.raises(UploadError) as error:
        upload.append(old, b"XXX")
    assert status(error) == (409, 3)
    upload.append(new, b"def")
    with pytest.raises(UploadError):
        upload.finish(old)
    assert upload.finish(new)


@pytest.mark.parametrize("sidecar", ["", "{", "[]", '{"sha256": 1}', '{"sha256": "x", "total": 2}'])
def test_an_invalid_sidecar_discards_the_partial_upload(tmp_path: Path, sidecar: str) -> None:
    upload = ReceivedUpload(tmp_path, LIMIT)
    upload.append(upload.begin(identity(b"abcdef"), 0), b"abc")
    (tmp_path / "upload.json").write_text(sidecar)
    again = ReceivedUpload(tmp_path, LIMIT)
    assert (again.identity, again.offset) == (None, 0)
    assert list(tmp_path.iterdir()) == []


def test_another_digest_discards_the_partial_upload(tmp_path: Path) -> None:
    upload = ReceivedUpload(tmp_path, LIMIT)
    upload.append(upload.begin(identity(b"abcdef"), 0), b"abc")
    named = ReceivedUpload(tmp_path, LIMIT, required_digest=digest(b"other"))
    assert named.offset == 0
    with pytest.raises(UploadError) as error:
        named.begin(identity(b"abcdef"), 0)
    assert error.value.reason == "WrongArchive"


def test_caps_the_archive(tmp_path: Path) -> None:
    upload = ReceivedUpload(tmp_path, 5)
    with pytest.raises(UploadError) as error:
        upload.begin(identity(b"abcdef"), 0)
    assert status(error) == (413, None)


def test_a_claim_that_is_too_small_is_reported_at_once(tmp_path: Path) -> None:
    upload = ReceivedUpload(tmp_path, 2**60)
    with pytest.raises(UploadError) as error:
        upload.begin(Identity("0" * 64, 2**55), 0)
    assert status(error) == (507, 0)
    assert "Increase volumes.workspace.size in a new job" in error.value.message
    assert upload.begin(identity(b"small"), 0)
