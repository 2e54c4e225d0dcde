"""Which archives of images the cache keeps."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from torchrun_cluster import artefacts, images, packages

TAG = "localhost/torchrun-test:dev"


@pytest.fixture
def build(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], Path]:
    """Build an image of this content, with a program that only writes an archive."""

    def write_archive(
        context: Path, tag: str, arguments: object, archive: Path, *_: object
    ) -> None:
        del tag, arguments
        image = context.with_name("image.tar")
        image.write_bytes((context / "content").read_bytes())
        artefacts.adopt(image, archive)

    monkeypatch.setattr(images, "cache_home", lambda: tmp_path / "cache")
    monkeypatch.setattr(images, "docker_answers", lambda: False)
    monkeypatch.setattr(images, "_buildah_build", write_archive)
    monkeypatch.setattr(packages, "ensure", lambda _: None)
    context = tmp_path / "context"
    context.mkdir()
    (context / "Dockerfile").write_text("FROM scratch\nCOPY content /\n")

    def build_with(content: str) -> Path:
        (context / "content").write_text(content)
        return images.build(context / "Dockerfile", context, TAG, inputs=["content"])

    return build_with


def test_the_cache_keeps_the_images_that_were_used_last(build: Callable[[str], Path]) -> None:
    first, second, third = built = [build(content) for content in ("1", "2", "3")]
    assert len(built) == images.MAX_ARCHIVES
    for seconds, archive in enumerate(built):
        os.utime(archive.parent, (seconds, seconds))
    assert build("1") == first
    fourth = build("4")
    kept = {archive for archive in (first, second, third, fourth) if archive.exists()}
    assert kept == {first, third, fourth}
