"""Image archives of both layouts, and the size of an image without its base."""

import hashlib
import io
import json
import tarfile
from pathlib import Path

import pytest

from torchrun_cluster import images, oci
from torchrun_cluster.errors import ClusterError


@pytest.fixture
def archive(tmp_path: Path) -> Path:
    program = tmp_path / "program"
    program.write_bytes(b"x" * 50_000)
    made = tmp_path / "image.tar"
    oci.write_program_image(made, "localhost/program:1", program)
    return made


def test_all_layers_count_without_a_base(archive: Path) -> None:
    (layer,) = oci.layers(archive)
    assert layer.content.startswith("sha256:")
    assert images.own_size(archive) == layer.size > 50_000


def test_layers_of_the_base_do_not_count(archive: Path) -> None:
    assert images.own_size(archive, archive) == 0


def test_a_file_is_read_from_the_layers(archive: Path) -> None:
    assert oci.read_file(archive, "program") == b"x" * 50_000
    with pytest.raises(ClusterError, match="has no file etc/program"):
        oci.read_file(archive, "etc/program")


def test_a_file_that_is_no_archive_is_reported(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_text("no tar")
    with pytest.raises(ClusterError, match="is not an image archive"):
        images.own_size(tmp_path / "image.tar")


def docker_archive(path: Path, *layers: bytes) -> Path:
    """An archive as `docker save` writes it before Docker 25; equal layers are links."""
    digests = [f"sha256:{hashlib.sha256(layer).hexdigest()}" for layer in layers]
    config = json.dumps({"rootfs": {"type": "layers", "diff_ids": digests}}).encode()
    name = f"{hashlib.sha256(config).hexdigest()}.json"
    names = [f"{number}/layer.tar" for number in range(len(layers))]
    entry = {"Config": name, "RepoTags": ["program:1", "other:2"], "Layers": names}
    with tarfile.open(path, "w") as tar:

        def add(file: str, content: bytes) -> None:
            member = tarfile.TarInfo(file)
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))

        add(name, config)
        for number, layer in enumerate(layers):
            first = layers.index(layer)
            if first < number:
                link = tarfile.TarInfo(names[number])
                link.type, link.linkname = tarfile.SYMTYPE, f"../{names[first]}"
                tar.addfile(link)
            else:
                add(names[number], layer)
        add("manifest.json", json.dumps([entry]).encode())
    return path


def test_an_archive_of_an_older_docker_is_read(tmp_path: Path) -> None:
    path = docker_archive(tmp_path / "saved.tar", b"a" * 1000, b"b" * 20, b"a" * 1000)
    digest = oci.configuration_digest(path)
    assert digest.startswith("sha256:")
    assert oci.images_in(path) == [oci.Image("program:1", digest), oci.Image("other:2", digest)]
    assert [layer.size for layer in oci.layers(path)] == [1000, 20, 1000]
    assert images.own_size(path, docker_archive(tmp_path / "base.tar", b"a" * 1000)) == 20


def test_the_layout_of_oci_comes_first(archive: Path) -> None:
    with tarfile.open(archive, "a") as tar:
        tar.addfile(tarfile.TarInfo("manifest.json"))
    (image,) = oci.images_in(archive)
    assert image.name == "localhost/program:1"


def test_a_program_may_have_a_folder(tmp_path: Path) -> None:
    program = tmp_path / "etcd"
    program.write_bytes(b"elf")
    oci.write_program_image(tmp_path / "image.tar", "etcd:1", program, "usr/local/bin")
    with tarfile.open(tmp_path / "image.tar") as image:
        contents = [
            member.read() for name in image.getnames() if (member := image.extractfile(name))
        ]
    (layer,) = (content for content in contents if not content.startswith(b"{"))
    with tarfile.open(fileobj=io.BytesIO(layer)) as tar:
        assert tar.getnames() == ["usr/local/bin/etcd"]
    assert any(b'"Entrypoint": ["/usr/local/bin/etcd"]' in content for content in contents)
