"""Images for the cluster: built by Docker where an engine answers, by buildah elsewhere.

The result is an OCI archive in the cache, under a key made of everything that went in. Without a
registry, `ARG BASE` of a Dockerfile is given a base image made of Debian packages. BASE_IMAGE names
another base: an image that Docker has or can pull, or `localhost/torchrun-base` for the one made of
Debian packages.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from . import artefacts, oci, packages
from .engine import docker_answers
from .errors import ClusterError
from .places import SOURCE, cache_home
from .progress import step

BASE = "localhost/torchrun-base:latest"
TORCH = "localhost/torchrun-torch:latest"
BASE_SETTING = "BASE_IMAGE"
SUITE = "trixie"
FORGET_HOST = 'rm -f "$1/etc/resolv.conf" "$1/etc/hostname"'
"""mmdebstrap leaves the building machine's name and name server in the image."""
BASE_PACKAGES = (
    *("ca-certificates", "python3", "python3-pip", "python3-venv"),
    *("git", "openssh-client"),
)
DOCUMENTATION = ("/usr/share/doc/*", "/usr/share/man/*", "/usr/share/locale/*")
CERTIFICATES = Path("/etc/ssl/certs")
BUNDLE = CERTIFICATES / "ca-certificates.crt"
DOCKERFILE = "Dockerfile.build"
FAST = "zstd"
"""Half the time of gzip, and less to unpack."""
PORTABLE = "gzip"
"""What every registry and engine reads."""
MAX_ARCHIVES = 3
"""Archives that are kept of one tag; older ones are deleted."""
PIP_SETTINGS = ("INDEX_URL", "EXTRA_INDEX_URL", "TRUSTED_HOST", "PROXY", "DEFAULT_TIMEOUT")
"""The caller's PIP_* that hold inside a build as well; others may name files of the host."""


def base(docker: bool | None = None) -> Path:
    """Archive of the base image, a system with Python, pip and certificates.

    It is the official Python image where Docker answers and BASE_IMAGE does not ask for the other
    one, which is made of Debian packages. `docker` is who makes it; None: Docker if it answers.
    """
    dockerfile = SOURCE / "images" / "base" / "Dockerfile"
    docker = docker_answers() if docker is None else docker
    if docker and _with_tag(os.environ.get(BASE_SETTING, "")) != BASE:
        return build(dockerfile.with_name("Dockerfile.docker"), dockerfile.parent, BASE)
    parts = [" ".join((SUITE, *BASE_PACKAGES, *DOCUMENTATION, FORGET_HOST)).encode()]
    parts.append(dockerfile.read_bytes())
    # Docker cannot mount the certificates of this machine into a build, as buildah can.
    trusted = BUNDLE.read_bytes() if docker and BUNDLE.exists() else b""
    if docker:
        parts += [b"docker", trusted]
    archive = _place(BASE, digest(parts))
    with artefacts.locked(archive.parent):
        if _is_cached(archive):
            return archive
        packages.ensure({"mmdebstrap": "mmdebstrap"} if docker else packages.IMAGES)
        with _workplace(archive) as context:
            with step(f"installing Debian {SUITE} for {BASE}"):
                debootstrap(context / "base.tar", SUITE, BASE_PACKAGES)
            recipe = dockerfile.read_text()
            if trusted:
                (context / BUNDLE.name).write_bytes(trusted)
                recipe += f"COPY {BUNDLE.name} {BUNDLE}\n"
            (context / DOCKERFILE).write_text(recipe)
            if docker:
                _docker_build(context, BASE, {}, archive)
            else:
                _buildah_build(context, BASE, {}, archive)
    return archive


def torch() -> Path:
    """Archive of the base image with PyTorch, for examples and end-to-end tests."""
    folder = SOURCE / "images" / "torch"
    return build(folder / "Dockerfile", folder, TORCH)


LOCAL_BASES: Mapping[str, Callable[[bool], Path]] = {BASE: base, TORCH: lambda _: torch()}
"""Images that are built when a Dockerfile asks for them as its BASE."""


def build(
    dockerfile: Path,
    context: Path,
    tag: str,
    build_args: Mapping[str, str] | None = None,
    inputs: Sequence[str] = (),
    timestamp: int | None = None,
) -> Path:
    """Build an image and return its archive; the cached one when nothing has changed.

    `tag` is a full reference such as localhost/torchrun-controller:dev. `inputs` are files or
    folders of `context`, relative to it; without them, all files that git does not ignore. The
    build sees those and nothing else, so that they and the arguments are the whole key.

    `timestamp`, in seconds since 1970, becomes the time of the image and of all files in its own
    layers. buildah builds such an image, because Docker's classic builder cannot.
    """
    files = _input_files(context, inputs)
    arguments = dict(build_args or {})
    docker = timestamp is None and docker_answers()
    parts = [dockerfile.read_bytes(), tag.encode(), b"docker" if docker else b"buildah"]
    for name in files:
        mode = b"x" if os.access(context / name, os.X_OK) else b"-"
        parts += [name.encode(), mode, (context / name).read_bytes()]
    parent = _local_base(dockerfile, arguments, docker=docker)
    if parent:
        parts.append(artefacts.recorded_sha256(parent).encode())
    parts += [f"{name}={value}".encode() for name, value in sorted(arguments.items())]
    # An image that is not made here is fetched if buildah does not have it.
    options = ["--pull=never" if parent else "--pull=false"]
    if timestamp is not None:
        options.append(f"--timestamp={timestamp}")
        parts.append(options[-1].encode())
    archive = _place(tag, digest(parts))
    with artefacts.locked(archive.parent):
        if _is_cached(archive):
            return archive
        with _workplace(archive) as clean:
            for name in files:
                (clean / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy(context / name, clean / name)
            shutil.copy(dockerfile, clean / DOCKERFILE)
            if docker:
                if parent:
                    _into_docker(arguments["BASE"], parent)
                _docker_build(clean, tag, arguments, archive)
            else:
                packages.ensure(packages.IMAGES)
                if parent:
                    _into_store(arguments["BASE"], parent)
                compression = FAST if timestamp is None else PORTABLE
                _buildah_build(clean, tag, arguments, archive, options, compression)
    return archive


def own_size(archive: Path, parent: Path | None = None) -> int:
    """Bytes of an image's layers, without those of the image that it was built on.

    They are compressed where buildah made the archive, which is what nodes pull, and not where
    Docker did.
    """
    below = {layer.content for layer in oci.layers(parent)} if parent else set()
    return sum(layer.size for layer in oci.layers(archive) if layer.content not in below)


def read_file(archive: Path, path: str) -> str:
    """A text file of an image; the image need not run here, but its `cat` must."""
    tag = oci.images_in(archive)[0].name
    if docker_answers():
        _into_docker(tag, archive)
        return _run(["docker", "run", "--rm", "--network=none", tag, "cat", path])
    with artefacts.locked(cache_home() / "buildah"):
        _into_store(tag, archive)
        container = _run([*_buildah(), "from", "--pull-never", tag]).strip()
        try:
            return _run([*_buildah(), "run", "--isolation=chroot", container, "--", "cat", path])
        finally:
            _run([*_buildah(), "rm", container])


@contextmanager
def _workplace(archive: Path) -> Iterator[Path]:
    """An empty build context beside the archive to be; clears what other builds have left."""
    for stale in archive.parent.glob("building-*"):
        shutil.rmtree(stale)
    with tempfile.TemporaryDirectory(prefix="building-", dir=archive.parent) as work:
        context = Path(work) / "context"
        context.mkdir()
        yield context
    _forget_older(archive)


def _local_base(dockerfile: Path, arguments: dict[str, str], *, docker: bool) -> Path | None:
    """Archive of the local image that the Dockerfile builds on; names it in `arguments`.

    None where the Dockerfile has no ARG BASE, or the image is not made here.
    """
    declares = any(
        line.split("=")[0].split() == ["ARG", "BASE"]
        for line in dockerfile.read_text().splitlines()
    )
    if not declares:
        return None
    name = arguments.get("BASE") or os.environ.get(BASE_SETTING) or ("" if docker else BASE)
    if not name:
        return None
    name = arguments["BASE"] = _with_tag(name)
    return LOCAL_BASES[name](docker) if name in LOCAL_BASES else None


def _with_tag(name: str) -> str:
    """The name of an image with the tag that it stands for."""
    return name if not name or ":" in name.rpartition("/")[2] else f"{name}:latest"


def _input_files(context: Path, inputs: Sequence[str]) -> list[str]:
    if not inputs:
        listed = subprocess.run(
            ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
            cwd=context,
            capture_output=True,
            text=True,
            check=False,
        )
        if listed.returncode == 0:
            names = listed.stdout.split("\0")
            return sorted(name for name in names if name and (context / name).is_file())
    paths: set[Path] = set()
    for name in inputs or ["."]:
        path = context / name
        if not path.exists():
            raise ClusterError(f"{name} is not in the build context {context}")
        paths.update([path] if path.is_file() else path.rglob("*"))
    files = (path for path in paths if path.is_file() and "__pycache__" not in path.parts)
    return sorted(str(path.relative_to(context)) for path in files)


def digest(parts: Sequence[bytes]) -> str:
    """The key of what these parts make: 16 hexadecimal digits."""
    whole = hashlib.sha256()
    for part in parts:
        whole.update(len(part).to_bytes(8, "big") + part)
    return whole.hexdigest()[:16]


def _is_cached(archive: Path) -> bool:
    """Whether the archive is whole; sets the time of its last use, see `_forget_older`."""
    if not artefacts.is_whole(archive):
        return False
    # Otherwise the builds of another checkout could delete it before it is loaded.
    os.utime(archive.parent)
    return True


def _forget_older(archive: Path) -> None:
    """Delete the archives of the same tag except those that were built or used last."""
    tag = archive.parent.name.rpartition("-")[0]
    folders = [
        folder
        for folder in archive.parent.parent.glob(f"{tag}-*")
        if folder.name.rpartition("-")[0] == tag
    ]
    for folder in sorted(folders, key=lambda path: path.stat().st_mtime, reverse=True)[
        MAX_ARCHIVES:
    ]:
        shutil.rmtree(folder)


def _place(tag: str, key: str) -> Path:
    name = tag.removeprefix("localhost/").replace("/", "_").replace(":", "-")
    return cache_home() / "images" / f"{name}-{key}" / "image.tar"


def debootstrap(target: Path, suite: str, included: Sequence[str]) -> None:
    """Write a minimal Debian with these packages, and without documentation, as a tar file."""
    excluded = [f"--dpkgopt=path-exclude={pattern}" for pattern in DOCUMENTATION]
    options = [
        "--quiet",
        "--variant=minbase",
        f"--include={','.join(included)}",
        *excluded,
        f"--customize-hook={FORGET_HOST}",
    ]
    _run(["mmdebstrap", *options, suite, str(target)])


def _buildah() -> list[str]:
    # A store of our own: the host's images stay as they are.
    store = cache_home() / "buildah"
    return ["buildah", "--root", str(store / "root"), "--runroot", str(store / "run")]


def docker(*arguments: str) -> str:
    """Run a command of Docker's client and return its stdout. Raises ClusterError."""
    return _run(["docker", *arguments])


def docker_image(name: str) -> str:
    """The ID of an image in Docker's store, or "" where there is none of that name."""
    command = ["docker", "image", "inspect", "--format", "{{.Id}}", name]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()


def _into_docker(name: str, archive: Path) -> None:
    """Make `name` in Docker's store the image of the archive."""
    if oci.configuration_digest(archive) != docker_image(name):
        with step(f"unpacking {name}"):
            docker("load", "--input", str(archive))


def _into_store(name: str, archive: Path) -> None:
    """Make `name` in buildah's store the image of the archive, and replace an older one."""
    known = subprocess.run(
        [*_buildah(), "images", "--quiet", "--no-trunc", name],
        capture_output=True,
        text=True,
        check=False,
    )
    if oci.configuration_digest(archive) not in known.stdout.split():
        with step(f"unpacking {name}"):
            _run([*_buildah(), "pull", "--quiet", f"oci-archive:{archive}:{name}"])


def _buildah_build(
    context: Path,
    tag: str,
    arguments: Mapping[str, str],
    archive: Path,
    options: Sequence[str] = ("--pull=never",),
    compression: str = FAST,
) -> None:
    values = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    command = [*_buildah(), "bud", "--isolation", "chroot", "--layers=false", *options]
    with artefacts.locked(cache_home() / "buildah"), tempfile.NamedTemporaryFile("w") as pip_conf:
        # What a build that was killed has left.
        _run([*_buildah(), "rm", "--all"])
        mounts = _mounts(pip_conf)
        with step(f"building {tag}"):
            _run([*command, *mounts, *values, "-f", DOCKERFILE, "-t", tag, "."], context)
            # The image that had this tag before.
            _run([*_buildah(), "rmi", "--prune"])
        temporary = context.with_name("image.tar")
        with step(f"packing {tag}"):
            push = [*_buildah(), "push", "--quiet", f"--compression-format={compression}"]
            _run([*push, tag, f"oci-archive:{temporary}:{tag}"])
            artefacts.adopt(temporary, archive)


def _mounts(pip_conf: IO[str]) -> list[str]:
    mounts: list[str] = []
    if CERTIFICATES.is_dir():
        # A registry may be behind a certificate that only this machine trusts.
        mounts += ["--volume", f"{CERTIFICATES}:{CERTIFICATES}:ro"]
    if settings := pip_configuration(os.environ):
        pip_conf.write(settings)
        pip_conf.flush()
        mounts += ["--volume", f"{pip_conf.name}:/etc/pip.conf:ro"]
    return mounts


def _docker_build(context: Path, tag: str, arguments: Mapping[str, str], archive: Path) -> None:
    values = [f"--build-arg={name}={value}" for name, value in arguments.items()]
    with step(f"building {tag}"):
        _run(["docker", "build", "--quiet", *values, "-f", DOCKERFILE, "-t", tag, "."], context)
    temporary = context.with_name("image.tar")
    with step(f"packing {tag}"):
        _run(["docker", "save", "--output", str(temporary), tag])
        artefacts.adopt(temporary, archive)


def pip_configuration(environment: Mapping[str, str]) -> str:
    """A pip.conf with the caller's own package index, or nothing when there is none."""
    lines = [
        f"{name.lower().replace('_', '-')} = {environment[f'PIP_{name}']}"
        for name in PIP_SETTINGS
        if environment.get(f"PIP_{name}")
    ]
    return "\n".join(["[global]", *lines, ""]) if lines else ""


def _run(command: Sequence[str], folder: Path | None = None) -> str:
    result = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, errors="replace", check=False
    )
    if result.returncode:
        ending = "\n".join((result.stdout + result.stderr).splitlines()[-25:])
        raise ClusterError(f"`{' '.join(command)}` failed:\n{ending}")
    return result.stdout
