"""Command line: `PYTHONPATH=cluster python3 -m torchrun_cluster VERB`."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from . import addons, binaries, images, node_image, packages, plan, processes, state, tools
from .dockerd import DockerEngine
from .engine import Engine, choose, docker_answers, look_at_machine
from .errors import ClusterError
from .kind import IMAGE_SETTING, KindCluster
from .local import LocalCluster
from .places import cache_home
from .progress import say
from .state import Size

DESCRIPTION = """Start Kubernetes clusters for the demo and the tests.

CLUSTER=current uses the cluster of your kubeconfig, CLUSTER=kind creates one with kind, and
CLUSTER=local creates one from real components on this machine. Default: kind if a Docker engine
answers; local in CI (CI=true), or for root on a machine with neither Docker nor a kubeconfig.
KUBERNETES=1.33, 1.34, 1.35 or 1.36 starts a local cluster of that release instead of 1.37.
TORCHRUN_CACHE and TORCHRUN_STATE are the folders of the caches and of the clusters.
"""

PLAN = """Starting Kubernetes on this machine (nodes: {nodes}):
- apt-get installs missing Debian packages: {packages}
- etcd, Kubernetes, containerd and the pods run as root in their own namespaces and cgroup;
  they use one port of the host, on 127.0.0.1
- programs and images are stored in {cache}, the cluster in {folder}
To stop it: PYTHONPATH=cluster python3 -m torchrun_cluster down --name {name}"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code."""
    options = _parser().parse_args(arguments)
    try:
        code: int | None = options.run(options)
    except ClusterError as error:
        say(f"error: {error}")
        return 1
    except KeyboardInterrupt:
        say("interrupted; the next `up` or `down` cleans up")
        return 130
    return code or 0


def _up(options: argparse.Namespace) -> None:
    name, size = options.name, Size(options.size)
    exists = state.read(name) is not None or size is Size.CONTROL_PLANE
    engine = Engine.LOCAL if exists else choose(look_at_machine())
    if options.addons and engine is not Engine.LOCAL:
        raise ClusterError(
            "--with requires a local cluster: set CLUSTER=local, or install the add-on yourself"
        )
    if options.nodes > 1 and engine is not Engine.LOCAL:
        raise ClusterError("--nodes requires a local cluster: set CLUSTER=local")
    if os.environ.get("KUBERNETES") and engine is not Engine.LOCAL:
        raise ClusterError("KUBERNETES requires a local cluster: set CLUSTER=local")
    if options.image and engine is not Engine.KIND:
        raise ClusterError("--image requires a kind cluster: set CLUSTER=kind")
    if engine is Engine.CURRENT:
        say("using the cluster of your kubeconfig; nothing was started")
    elif engine is Engine.KIND:
        KindCluster(name, options.port, options.image).up()
    else:
        if not exists:
            _say_plan(name, options.nodes)
        local = LocalCluster(
            name=name,
            size=size,
            port=options.port,
            scheduler=options.scheduler,
            nodes=options.nodes,
        )
        local.up()
        for addon in options.addons:
            local.install(addon)
    if engine is not Engine.CURRENT:
        say(f"the cluster is up: export KUBECONFIG={state.folder_of(name) / 'kubeconfig'}")


def _say_plan(name: str, nodes: int) -> None:
    absent = " ".join(packages.missing(packages.NODE)) or "none"
    folder = state.folder_of(name)
    say(PLAN.format(packages=absent, cache=cache_home(), folder=folder, name=name, nodes=nodes))


def _down(options: argparse.Namespace) -> None:
    for name in state.names() if options.all else [options.name]:
        kind = KindCluster(name)
        if kind.recorded:
            kind.down()
        else:
            LocalCluster(name=name).down()
        say(f"cluster {name!r} is down")


def _status(options: argparse.Namespace) -> None:
    print(f"{'NAME':20} {'KIND':14} {'STATE':10} SERVER")
    for name in state.names():
        recorded = state.read(name)
        if KindCluster(name).recorded:
            running = KindCluster(name).is_running()
            print(f"{name:20} {'kind':14} {'up' if running else 'stopped':10} see kubeconfig")
        elif recorded:
            alive = {process.component for process in processes.of_cluster(recorded.folder)}
            dead = [part for part in recorded.components if part not in alive]
            healthy = "up" if recorded.complete and not dead else "broken"
            print(f"{name:20} {recorded.spec.size.value:14} {healthy:10} {recorded.server}")
            if dead:
                print(f"  not running: {', '.join(dead)}; `up` starts them again")
        else:
            print(f"{name:20} {'local':14} {'broken':10} (clean up with `down --name {name}`)")


def _kubeconfig(options: argparse.Namespace) -> None:
    if os.environ.get("CLUSTER") == Engine.CURRENT.value:
        print(os.environ.get("KUBECONFIG", os.path.expanduser("~/.kube/config")))
        return
    kind = KindCluster(options.name)
    print(kind.kubeconfig if kind.recorded else LocalCluster.existing(options.name).kubeconfig)


def _load(options: argparse.Namespace) -> None:
    if os.environ.get("CLUSTER") == Engine.CURRENT.value:
        raise ClusterError(
            "images cannot be loaded into the nodes of your cluster: push them to a"
            " registry that the nodes can reach, and use that name in your manifests"
        )
    kind = KindCluster(options.name)
    for archive in options.archives:
        if kind.recorded:
            kind.load_image(archive)
        else:
            new = LocalCluster.existing(options.name).load_image(archive)
            say(f"{archive}: {', '.join(new) or 'already loaded'}")


def _binaries(options: argparse.Namespace) -> None:
    for path in binaries.ensure(options.programs or binaries.NODE).values():
        print(path)


def _kubectl(options: argparse.Namespace) -> None:
    kind = KindCluster(options.name).recorded
    print(tools.ensure("kubectl") if kind else binaries.ensure(["kubectl"])["kubectl"])


def _with_docker(options: argparse.Namespace) -> int:
    """Run the command, and return its exit code."""
    if docker_answers():
        say("using the Docker engine that answers")
        return processes.run_command(options.command)
    engine = DockerEngine()
    with engine.running():
        os.environ["DOCKER_HOST"] = engine.host
        docker_answers.cache_clear()
        environment = {**os.environ}
        # It pulls nothing, so that it needs no registry.
        environment.setdefault(images.BASE_SETTING, images.BASE)
        if options.kind and not environment.get(IMAGE_SETTING):
            environment[IMAGE_SETTING] = node_image.ensure()
        return processes.run_command(options.command, environment)


def _image_build(options: argparse.Namespace) -> None:
    build_args = dict(pair.split("=", 1) for pair in options.build_arg)
    context = options.context
    dockerfile = options.file or context / "Dockerfile"
    print(images.build(dockerfile, context, options.tag, build_args, options.input))


def _image_size(options: argparse.Namespace) -> None:
    print(f"{images.own_size(options.archive, options.base) / 1e6:.1f} MB without its base")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "torchrun_cluster",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    named = argparse.ArgumentParser(add_help=False)
    named.add_argument("--name", default="demo", help="name of the cluster (default: demo)")

    up = verbs.add_parser(
        "up", parents=[named], help="start a cluster, or what has stopped of an existing one"
    )
    sizes = [size.value for size in Size]
    up.add_argument("--size", choices=sizes, default="node", help="control-plane: without pods")
    up.add_argument(
        "--nodes", type=int, default=1, metavar="N", help="nodes of a local cluster (default: 1)"
    )
    up.add_argument(
        "--port", type=int, default=0, help="local port of the API server (default: a free port)"
    )
    up.add_argument(
        "--scheduler", action="store_true", help="also run kube-scheduler with --size control-plane"
    )
    up.add_argument(
        "--with",
        dest="addons",
        action="append",
        default=[],
        choices=sorted(addons.ADDONS),
        help="add-on to install (repeatable); built at its first use",
    )
    up.add_argument("--image", default="", help=f"kind's node image (default: ${IMAGE_SETTING})")
    up.set_defaults(run=_up)

    announced = verbs.add_parser(
        "plan", help="what `up` and the images need, and how long it takes"
    )
    announced.set_defaults(run=lambda _: plan.say_plan())

    down = verbs.add_parser("down", parents=[named], help="stop a cluster and delete its files")
    down.add_argument("--all", action="store_true", help="all clusters on this machine")
    down.set_defaults(run=_down)

    verbs.add_parser("status", help="list the clusters").set_defaults(run=_status)

    kubeconfig = verbs.add_parser(
        "kubeconfig", parents=[named], help="print the path of the kubeconfig"
    )
    kubeconfig.set_defaults(run=_kubeconfig)

    kubectl = verbs.add_parser(
        "kubectl", parents=[named], help="print the path of a kubectl for it"
    )
    kubectl.set_defaults(run=_kubectl)

    load = verbs.add_parser("load", parents=[named], help="import image archives into the nodes")
    load.add_argument("archives", nargs="+", type=Path, metavar="ARCHIVE")
    load.set_defaults(run=_load)

    programs = verbs.add_parser("binaries", help="build the programs and print their paths")
    programs.add_argument("programs", nargs="*", help="default: all programs of a node")
    programs.set_defaults(run=_binaries)
    docker = verbs.add_parser(
        "with-docker",
        help="run a command with the Docker engine of this machine, or with a temporary one",
    )
    docker.add_argument(
        "--kind",
        action="store_true",
        help=f"one of its own gets a node image: sets {IMAGE_SETTING}",
    )
    docker.add_argument("command", nargs=argparse.REMAINDER, metavar="COMMAND")
    docker.set_defaults(run=_with_docker)
    _add_image_verbs(
        verbs.add_parser("image", help="build an image and print the path of its archive")
    )
    return parser


def _add_image_verbs(image: argparse.ArgumentParser) -> None:
    kinds = image.add_subparsers(required=True, metavar="IMAGE")
    base = kinds.add_parser("base", help=f"Debian with Python: {images.BASE}")
    base.set_defaults(run=lambda _: print(images.base()))
    node = kinds.add_parser("node", help="a node for kind, in Docker's store; prints its name")
    node.set_defaults(run=lambda _: print(node_image.ensure()))
    torch = kinds.add_parser("torch", help=f"the same with PyTorch: {images.TORCH}")
    torch.set_defaults(run=lambda _: print(images.torch()))
    build = kinds.add_parser("build", help="any Dockerfile; ARG BASE is the base image")
    build.add_argument("--tag", required=True, help="for example localhost/mine:dev")
    build.add_argument("--context", type=Path, default=Path("."), help="default: this folder")
    build.add_argument("--file", type=Path, help="default: the context's Dockerfile")
    build.add_argument("--build-arg", action="append", default=[], metavar="NAME=VALUE")
    build.add_argument(
        "--input", action="append", default=[], help="path of the context to include (repeatable)"
    )
    build.set_defaults(run=_image_build)
    size = kinds.add_parser("size", help="print what an image adds to its base, in MB")
    size.add_argument("archive", type=Path, metavar="ARCHIVE")
    size.add_argument("--base", type=Path, metavar="ARCHIVE", help="base image")
    size.set_defaults(run=_image_size)
    cat = kinds.add_parser("cat", help="print a text file of an image")
    cat.add_argument("archive", type=Path, metavar="ARCHIVE")
    cat.add_argument("path", metavar="PATH")
    cat.set_defaults(
        run=lambda options: print(images.read_file(options.archive, options.path), end="")
    )


if __name__ == "__main__":
    sys.exit(main())
