"""`kt`: run, deploy and look after what is called from Python."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from torchrun_sdk.apps import RUN, App
from torchrun_sdk.errors import CallError, ClusterError, Detached, SdkError, UsageError
from torchrun_sdk.function import Remote, attach
from torchrun_sdk.import_guard import CallInImport, importing
from torchrun_sdk.kubectl import Kubectl
from torchrun_sdk.manifest import LABEL
from torchrun_sdk.spec import SCRIPT_NAME

_CLUSTER = 4  # exit code
_EPILOG = """examples:
  kt run python my_script.py        run a script; an app that it defines runs in the cluster
  kt deploy my_script.py            start each remote function and app of a file, and return
  kt logs train-x7k2p               follow the log of all ranks
  kt results train-x7k2p            what the function returned; waits while it runs
  kt list
  kt down train-x7k2p               delete a job, and with it its pods

The namespace is kubectl's, or TORCHRUN_NAMESPACE, or -n.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code: 0, 1 where a run failed, 2 for a wrong use, 4 where the cluster refused."""
    asked = _parser().parse_args(arguments)
    namespace = asked.namespace or os.environ.get("TORCHRUN_NAMESPACE", "")
    if namespace:
        os.environ["TORCHRUN_NAMESPACE"] = namespace
    try:
        code: int = asked.work(asked, Kubectl(namespace))
    except Detached:
        return 130
    except CallError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except ClusterError as error:
        sys.stderr.write(f"error: {error}\n")
        return _CLUSTER
    except SdkError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kt",
        description="Python functions and apps on many Kubernetes nodes.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--namespace", default="", help="as for kubectl")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    run = verbs.add_parser("run", help="run a command whose apps run in the cluster")
    run.add_argument("command", nargs=argparse.REMAINDER, help="as python my_script.py")
    run.set_defaults(work=_run)
    deploy = verbs.add_parser("deploy", help="start each remote function and app of a file")
    deploy.add_argument("script")
    deploy.set_defaults(work=_deploy)
    logs = verbs.add_parser("logs", help="follow a job's log")
    logs.add_argument("job")
    logs.set_defaults(work=_logs)
    results = verbs.add_parser("results", help="what a job's last call returned, as JSON")
    results.add_argument("job")
    results.add_argument(
        "--trust",
        action="store_true",
        help="open a pickle of a job that you did not make here: it runs code that its pods choose",
    )
    results.set_defaults(work=_results)
    verbs.add_parser("list", help="jobs that this package made").set_defaults(work=_list)
    down = verbs.add_parser("down", help="delete jobs")
    down.add_argument("job", nargs="+")
    down.set_defaults(work=_down)
    return parser


def _run(asked: argparse.Namespace, kubectl: Kubectl) -> int:
    if not asked.command:
        raise UsageError("kt run: which command? As in kt run python my_script.py")
    environment = {**os.environ, RUN: "1"}
    return subprocess.run(asked.command, env=environment, check=False).returncode


def _deploy(asked: argparse.Namespace, kubectl: Kubectl) -> int:
    found = deployable(Path(asked.script))
    if not found:
        raise UsageError(
            f"{asked.script} defines no remote function (kt.fn, decorators) and no app"
        )
    for one in found:
        print(one.deploy())
    return 0


def deployable(script: Path) -> list[App | Remote]:
    """Each remote function and app that a file defines, once. A call in it is not made."""
    sys.path.insert(0, str(script.resolve().parent))
    with importing(""):
        try:
            names = runpy.run_path(str(script), run_name=SCRIPT_NAME)
        except CallInImport as reached:
            names = vars(reached.module)
    found = {id(value): value for value in names.values() if isinstance(value, (App, Remote))}
    return list(found.values())


def _logs(asked: argparse.Namespace, kubectl: Kubectl) -> int:
    return subprocess.run(kubectl.plugin("logs", asked.job, "--follow"), check=False).returncode


def _results(asked: argparse.Namespace, kubectl: Kubectl) -> int:
    returned = attach(asked.job, stream_logs=False, trust=asked.trust)
    print(json.dumps(returned, default=repr))
    return 0


def _list(asked: argparse.Namespace, kubectl: Kubectl) -> int:
    return _kubectl(kubectl.command("get", "torchrunjobs", "--selector", LABEL))


def _down(asked: argparse.Namespace, kubectl: Kubectl) -> int:
    return _kubectl(kubectl.command("delete", "torchrunjobs", *asked.job, "--wait=false"))


def _kubectl(command: list[str]) -> int:
    """kubectl itself says why it was refused."""
    return _CLUSTER if subprocess.run(command, check=False).returncode else 0


if __name__ == "__main__":
    sys.exit(main())
