"""Command line: `PYTHONPATH=cluster python3 -m torchrun_release VERB`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from torchrun_cluster import ClusterError
from torchrun_cluster.places import SOURCE
from torchrun_cluster.progress import say, step

from . import archives, image, kubernetes, python, source, versions
from .errors import ReleaseError

ROOT = SOURCE.parent
REGISTRY = "registry.example.com"
DOWNLOADS = "https://releases.example.com/torchrun-controller"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        options.run(options)
    except (ReleaseError, ClusterError) as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the output folder is unchanged")
        return 130
    return 0


def _set_version(options: argparse.Namespace) -> None:
    changed = versions.set_version(options.root, options.version)
    for path in changed:
        say(path)
    say(f"{len(changed)} files changed" if changed else f"all files have {options.version}")
    if changed:
        say(f"Next: date the section {options.version} of CHANGELOG.md, then commit")


def _build(options: argparse.Namespace) -> None:
    version, output = options.version, options.output.resolve()
    commit = source.find_commit(options.root, version)
    url = f"{options.downloads.rstrip('/')}/v{version}"
    scratch = options.root / "build"
    scratch.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="release-", dir=scratch) as work:
        exported, target = Path(work, "source"), Path(work, "dist")
        target.mkdir()
        with step(f"exporting {commit.revision[:12]}"):
            source.export(options.root, commit, exported)
            name = kubernetes.name_image(exported, options.registry.rstrip("/"))
        with step(kubernetes.INSTALL):
            kubernetes.write_install(exported, target)
        with step("chart"):
            kubernetes.write_chart(exported, target, commit.epoch)
        with step("wheels of the plugin and the SDK"):
            builder = python.Builder(exported, Path(work), commit.epoch)
            builder.write_wheels(target)
        for platform in python.PLATFORMS:
            with step(f"plugin for {platform.os}/{platform.arch}"):
                builder.write_plugin(target, version, url, platform)
        with step("krew manifest"):
            python.write_manifest(target, version, url)
        built = image.build(exported, version, name, commit)
        with step("image archive and SBOM"):
            digest = image.write(built, target, version, commit)
        with step(archives.SUMS):
            archives.write_sums(target)
        shutil.rmtree(output, ignore_errors=True)
        shutil.move(target, output)
    say(f"{output}:")
    for path in sorted(output.iterdir()):
        say(f"  {path.stat().st_size / 1e6:7.2f} MB  {path.name}")
    say(f"image: {name}:{version}@{digest}")
    say(f"Next: publish the files at {url}; docs/releasing.md has the commands")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser("torchrun_release", description=__doc__)
    parser.add_argument(
        "--root", type=Path, default=ROOT, help="the checkout (default: that of this program)"
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    changes = verbs.add_parser("version", help="set the version in all files")
    changes.add_argument("version", metavar="VERSION", help="for example 0.2.0")
    changes.set_defaults(run=_set_version)
    build = verbs.add_parser("build", help="write all files of a release")
    build.add_argument("version", metavar="VERSION", help="the version in all files")
    build.add_argument("--output", type=Path, default=Path("dist"), help="default: dist")
    build.add_argument("--registry", default=REGISTRY, help="of the image, with its path")
    build.add_argument(
        "--downloads", default=DOWNLOADS, help="URL with a folder vVERSION for each release"
    )
    build.set_defaults(run=_build)
    return parser


if __name__ == "__main__":
    sys.exit(main())
