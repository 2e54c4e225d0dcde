"""Image archives: read what one holds, and write one of a single program.

An archive has the layout of OCI, that of `docker save` before Docker 25, or both.
"""

from __future__ import annotations

import hashlib
import io
import json
import platform
import posixpath
import tarfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from .errors import ClusterError

REFERENCE = "org.opencontainers.image.ref.name"
CONTAINERD_NAME = "io.containerd.image.name"


@dataclass(frozen=True)
class Image:
    """An image in an archive: full reference and digest of its manifest.

    Docker's older layout has no manifests: then it is the digest of the configuration.
    """

    name: str
    digest: str


def images_in(archive: Path) -> list[Image]:
    """The named images of an archive."""
    if (entries := _docker_entries(archive)) is not None:
        return [
            Image(name, _digest_in(entry["Config"]))
            for entry in entries
            for name in entry["RepoTags"] or ()
        ]
    images: list[Image] = []
    for manifest in _read(archive, "index.json")["manifests"]:
        annotations = manifest.get("annotations", {})
        name = annotations.get(CONTAINERD_NAME) or annotations.get(REFERENCE)
        if name:
            images.append(Image(name, manifest["digest"]))
    return images


def configuration_digest(archive: Path) -> str:
    """Digest of the first image's configuration: what buildah and Docker call the image ID."""
    if entries := _docker_entries(archive):
        return _digest_in(entries[0]["Config"])
    digest: str = _read(archive, "index.json")["manifests"][0]["digest"]
    manifest = _read(archive, f"blobs/{digest.replace(':', '/')}")
    config_digest: str = manifest["config"]["digest"]
    return config_digest


@dataclass(frozen=True)
class Layer:
    """One layer: the digest of what is in it, and its bytes as they stand in the archive."""

    content: str
    size: int


def layers(archive: Path) -> list[Layer]:
    """Layers of the first image, the lowest one first."""
    if entries := _docker_entries(archive):
        sizes = _sizes(archive)
        digests: list[str] = _read(archive, entries[0]["Config"])["rootfs"]["diff_ids"]
        return [
            Layer(content, sizes[name])
            for content, name in zip(digests, entries[0]["Layers"], strict=True)
        ]
    digest: str = _read(archive, "index.json")["manifests"][0]["digest"]
    manifest = _read(archive, f"blobs/{digest.replace(':', '/')}")
    config = _read(archive, f"blobs/{manifest['config']['digest'].replace(':', '/')}")
    contents: list[str] = config["rootfs"]["diff_ids"]
    return [
        Layer(content, layer["size"])
        for content, layer in zip(contents, manifest["layers"], strict=True)
    ]


def read_file(archive: Path, path: str) -> bytes:
    """A file of the first image, such as opt/app/main.py; its layers are plain or gzip.

    Raises ClusterError if no layer has it.
    """
    digest: str = _read(archive, "index.json")["manifests"][0]["digest"]
    manifest = _read(archive, f"blobs/{digest.replace(':', '/')}")
    with tarfile.open(archive, "r:") as tar:
        for layer in reversed(manifest["layers"]):
            blob = tar.extractfile(f"blobs/{layer['digest'].replace(':', '/')}")
            assert blob
            with tarfile.open(fileobj=blob, mode="r:*") as files:
                found = files.extractfile(path) if path in files.getnames() else None
                if found:
                    return found.read()
    raise ClusterError(f"{archive} has no file {path}")


def _docker_entries(archive: Path) -> list[dict[str, Any]] | None:
    """The manifest.json of an archive in Docker's older layout; None for one with OCI's."""
    names = _sizes(archive)
    if "index.json" in names or "manifest.json" not in names:
        return None
    entries: list[dict[str, Any]] = _load(archive, "manifest.json")
    return entries


def _digest_in(config: str) -> str:
    """The digest that the name of a configuration, such as 0123abcd.json, is made of."""
    return f"sha256:{config.rpartition('/')[2].removesuffix('.json')}"


def _sizes(archive: Path) -> dict[str, int]:
    """Names of the archive's files, and their sizes in bytes."""
    try:
        with tarfile.open(archive, "r:") as tar:
            sizes = {member.name: member.size for member in tar}
            # Docker stores a layer that it has already written as a link to it.
            for member in tar.getmembers():
                if member.issym():
                    target = posixpath.join(posixpath.dirname(member.name), member.linkname)
                    sizes[member.name] = sizes.get(posixpath.normpath(target), 0)
            return sizes
    except (OSError, tarfile.TarError) as error:
        raise _no_archive(archive, error) from error


def _read(archive: Path, name: str) -> dict[str, Any]:
    content: dict[str, Any] = _load(archive, name)
    return content


def _load(archive: Path, name: str) -> Any:  # noqa: ANN401  an object or a list, by its name
    try:
        with tarfile.open(archive, "r:") as tar:
            member = tar.extractfile(name)
            assert member
            return json.load(member)
    except (OSError, KeyError, tarfile.TarError, ValueError) as error:
        raise _no_archive(archive, error) from error


def _no_archive(archive: Path, error: Exception) -> ClusterError:
    return ClusterError(
        f"{archive} is not an image archive ({error}); make one with "
        "`docker save` or `buildah push IMAGE oci-archive:FILE:NAME`"
    )


def write_program_image(archive: Path, name: str, program: Path, folder: str = "") -> None:
    """Write an image whose only file, and entry point, is a static program; always the same bytes.

    `name` is the full reference, for example localhost/torchrun-pause:latest. `folder` is where the
    program is in the image, such as usr/local/bin; "" is the root.
    """
    path = f"{folder}/{program.name}" if folder else program.name
    layer = _layer(program, path)
    blobs: dict[str, bytes] = {}

    def add(content: bytes, media_type: str) -> dict[str, object]:
        digest = hashlib.sha256(content).hexdigest()
        blobs[digest] = content
        return {"mediaType": media_type, "digest": f"sha256:{digest}", "size": len(content)}

    layer_entry = add(layer, "application/vnd.oci.image.layer.v1.tar")
    config = {
        "architecture": _architecture(),
        "os": "linux",
        "config": {"Entrypoint": [f"/{path}"]},
        "rootfs": {"type": "layers", "diff_ids": [layer_entry["digest"]]},
    }
    config_entry = add(_encode(config), "application/vnd.oci.image.config.v1+json")
    media_type = "application/vnd.oci.image.manifest.v1+json"
    manifest = {
        "schemaVersion": 2,
        "mediaType": media_type,
        "config": config_entry,
        "layers": [layer_entry],
    }
    manifest_entry = add(_encode(manifest), media_type)
    manifest_entry["annotations"] = {REFERENCE: name, CONTAINERD_NAME: name}
    with tarfile.open(archive, "w") as tar:
        _add(tar, "oci-layout", _encode({"imageLayoutVersion": "1.0.0"}))
        _add(tar, "index.json", _encode({"schemaVersion": 2, "manifests": [manifest_entry]}))
        for digest, content in blobs.items():
            _add(tar, f"blobs/sha256/{digest}", content)


def _layer(program: Path, path: str) -> bytes:
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as tar:
        _add(tar, path, program.read_bytes(), mode=0o755)
    return buffer.getvalue()


def _add(tar: tarfile.TarFile, name: str, content: bytes, mode: int = 0o644) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _encode(content: object) -> bytes:
    return json.dumps(content, sort_keys=True).encode()


def _architecture() -> str:
    machine = platform.machine()
    return {"x86_64": "amd64", "aarch64": "arm64"}.get(machine, machine)
