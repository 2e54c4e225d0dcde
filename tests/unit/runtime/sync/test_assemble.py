"""Trees from files of the PVC, on file systems without links and modes."""

import errno
import os
from pathlib import Path

import pytest

from torchrun_api.contract.contents import Entry, Manifest
from torchrun_runtime.sync.archives.zip import extract
from torchrun_runtime.sync.assemble import Assembly
from torchrun_runtime.sync.claim import Claim
from torchrun_runtime.sync.settings import ArchiveLimits
from unit.runtime.syncing import archive


def refuse(*_: object, **__: object) -> None:
    raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))


@pytest.mark.parametrize("modes", [True, False], ids=["modes", "no modes"])
def test_files_are_copied_where_links_are_not_supported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, modes: bool
) -> None:
    """An SMB share may have neither links nor modes: each attempt fails with EPERM."""
    claim = Claim(tmp_path)
    claim.prepare()
    zipped = tmp_path / "archive.zip"
    zipped.write_bytes(archive({"a.sh": b"true"}))
    [file] = extract(zipped, claim.new, ArchiveLimits()).entries
    program = Entry("b.sh", file.sha256, file.size, "755")
    claim.publish(Manifest([file, program._replace(path="a.sh")]))
    (claim.tree(1) / "a.sh").chmod(0o755)
    monkeypatch.setattr(os, "link", refuse)
    if not modes:
        monkeypatch.setattr(os, "chmod", refuse)
    assembly = Assembly(claim, Manifest([program]), ArchiveLimits())
    assembly.reuse_own_files()
    assert assembly.missing() == []
    assembly.build()
    copy = claim.new / "b.sh"
    assert copy.read_bytes() == b"true"
    assert not copy.samefile(claim.tree(1) / "a.sh")
    if modes:
        assert copy.stat().st_mode & 0o777 == 0o755


def test_every_file_and_every_mebibyte_is_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a base, of the own revision, of an archive, and of copies where links do not work."""
    for name in ("base", "claim"):
        (tmp_path / name).mkdir()
    base, claim = Claim(tmp_path / "base"), Claim(tmp_path / "claim")
    large = {f"{name}.bin": name.encode() * (3 << 20) for name in "abc"}
    zipped = tmp_path / "archive.zip"
    manifests = []
    for holder, name in ((base, "a.bin"), (claim, "b.bin"), (claim, "c.bin")):
        holder.prepare()
        zipped.write_bytes(archive({name: large[name]}))
        manifests.append(extract(zipped, holder.new, ArchiveLimits()))
        if name != "c.bin":
            holder.publish(manifests[-1])
    claim.discard_tree()
    steps = []
    manifest = Manifest([entry for each in manifests for entry in each.entries])
    assembly = Assembly(claim, manifest, ArchiveLimits(), lambda: steps.append(len(steps)))
    counts = []
    monkeypatch.setattr(os, "link", refuse)
    for work in (
        assembly.reuse_own_files,
        lambda: assembly.copy_from_base(base),
        lambda: assembly.add_archive(zipped),
        assembly.build,
    ):
        before = len(steps)
        work()
        counts.append(len(steps) - before)
    assert counts == [1, 3, 4, 12]
