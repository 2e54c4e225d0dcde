"""Archives whose bytes depend on their content only, and their checksums."""

from __future__ import annotations

import gzip
import io
import tarfile
import zipfile
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torchrun_cluster.artefacts import sha256_of

SUMS = "SHA256SUMS"
COMPRESSION = 9


@dataclass(frozen=True)
class File:
    """A file of an archive."""

    content: bytes
    executable: bool = False


def write_tar(target: Path, files: Mapping[str, File], epoch: int) -> None:
    """Write the files in the order of their names, with this time, owner 0 and usual modes.

    The archive is compressed if its name ends with gz.
    """
    with _opened(target, epoch) as stream, tarfile.open(fileobj=stream, mode="w") as tar:
        for name, file in sorted(files.items()):
            entry = tarfile.TarInfo(name)
            entry.size, entry.mtime = len(file.content), epoch
            entry.mode = 0o755 if file.executable else 0o644
            tar.addfile(entry, io.BytesIO(file.content))


def read_tar(archive: Path) -> dict[str, File]:
    """The regular files of an archive, compressed or not, by name."""
    with tarfile.open(archive) as tar:
        return {
            member.name: File(_content(tar, member), bool(member.mode & 0o100))
            for member in tar
            if member.isfile()
        }


def read_wheels(wheels: Iterable[Path]) -> dict[str, File]:
    """The installed files of wheels. Wheels of one package for several Pythons are merged."""
    files: dict[str, File] = {}
    for wheel in sorted(wheels):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if not name.endswith(("/", ".dist-info/RECORD")):
                    files.setdefault(name, File(archive.read(name)))
    return files


def write_sums(folder: Path) -> None:
    """Write SHA256SUMS of all other files of the folder, as `sha256sum --check` reads it."""
    names = sorted(path.name for path in folder.iterdir() if path.name != SUMS)
    lines = [f"{sha256_of(folder / name)}  {name}\n" for name in names]
    (folder / SUMS).write_text("".join(lines), encoding="utf-8")


def _content(tar: tarfile.TarFile, member: tarfile.TarInfo) -> bytes:
    stream = tar.extractfile(member)
    assert stream
    return stream.read()


@contextmanager
def _opened(target: Path, epoch: int) -> Iterator[io.BufferedIOBase]:
    with target.open("wb") as raw:
        if not target.name.endswith("gz"):
            yield raw
            return
        with gzip.GzipFile("", "wb", COMPRESSION, raw, mtime=epoch) as packed:
            yield packed
