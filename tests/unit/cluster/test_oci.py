"""The size of an image without its base."""

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


def test_a_file_that_is_no_archive_is_reported(tmp_path: Path) -> None:
    (tmp_path / "image.tar").write_text("no tar")
    with pytest.raises(ClusterError, match="is not an OCI image archive"):
        images.own_size(tmp_path / "image.tar")
