"""`kt`: run, deploy and manage functions and apps."""

from __future__ import annotations

import argparse
import json
import os
import runpy
import sys
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

from torchrun_sdk.apps import RUN, App
from torchrun_sdk.cluster.kubectl import Kubectl, run_attached
from torchrun_sdk.cluster.manifest import LABEL
from torchrun_sdk.errors import CallError, ClusterError, SdkError, UsageError
from torchrun_sdk.function import Remote, attach
from torchrun_sdk.source.import_guard import CallInImport, importing
from torchrun_sdk.spec import SCRIPT_NAME

_USAGE, _CLUSTER, _INTERRUPTED = 2, 4, 130  # exit codes
_EPILOG = """examples:
  kt run python my_script.py        run a script; its apps run in the cluster
  kt deploy my_script.py            start the remote functions and apps of a file
  kt logs train-x7k2p               follow the logs of all ranks
  kt results train-x7k2p            print the results; wait if the function still runs
  kt list                           list jobs
  kt down train-x7k2p               delete a job and its pods

The namespace is that of -n, else TORCHRUN_NAMESPACE, else that of kubectl.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit code.

    0; 1: the run failed; 2: invalid usage or a pickle that is not trusted; 4: the cluster refused;
    130: Ctrl-C.
    """
    options = _parser().parse_args(arguments)
    namespace = options.namespace or os.environ.get("TORCHRUN_NAMESPACE", "")
    if namespace:
        os.environ["TORCHRUN_NAMESPACE"] = namespace
    try:
        code: int = options.work(options, Kubectl(namespace))
    except KeyboardInterrupt:  # or Detached
        return _INTERRUPTED
    except CallError as error:
        sys.stderr.write(f"error: {error}\n")
        return 1
    except ClusterError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE if isinstance(error, UsageError) else _CLUSTER
    except SdkError as error:
        sys.stderr.write(f"error: {error}\n")
        return _USAGE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="kt",
        description="Run Python functions and apps on many nodes of a cluster.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("-n", "--namespace", default="", help="namespace of jobs and queues")
    verbs = parser.add_subparsers(required=True, metavar="COMMAND")
    run = verbs.add_parser("run", help="run a command; its apps run in the cluster")
    run.add_argument("command", nargs=argparse.REMAINDER, help="for example python my_script.py")
    run.set_defaults(work=_run)
    deploy = verbs.add_parser("deploy", help="start the remote functions and apps of a file")
    deploy.add_argument("script")
    deploy.set_defaults(work=_deploy)
    logs = verbs.add_parser("logs", help="follow the logs of a job")
    logs.add_argument("job")
    logs.set_defaults(work=_logs)
    results = verbs.add_parser("results", help="print the results of a job's last call as JSON")
    results.add_argument("job")
    results.add_argument(
        "--trust",
        action="store_true",
        help="open pickles of a job that was not created on this machine; they can run any code",
    )
    results.set_defaults(work=_results)
    verbs.add_parser("list", help="list jobs of this package").set_defaults(work=_list)
    down = verbs.add_parser("down", help="delete jobs")
    down.add_argument("job", nargs="+")
    down.set_defaults(work=_down)
    return parser


def _run(options: argparse.Namespace, kubectl: Kubectl) -> int:
    if not options.command:
        raise UsageError("No command given. Example: kt run python my_script.py")
    try:
        return run_attached(options.command, {**os.environ, RUN: "1"})
    except OSError as error:
        raise UsageError(f"Cannot run {options.command[0]}: {error.strerror}.") from error


def _deploy(options: argparse.Namespace, kubectl: Kubectl) -> int:
    members = deployable(Path(options.script))
    if not members:
        raise UsageError(
            f"{options.script} defines no remote function or app. Add one with kt.fn, a decorator"
            " or kt.app."
        )
    for member in members:
        print(member.deploy())
    return 0


def deployable(script: Path) -> list[App | Remote]:
    """The remote functions and apps that a file defines, each once. Its calls are not made.

    Raises UsageError without the file, and exceptions of the file.
    """
    if not script.is_file():
        raise UsageError(f"{script} is not a file.")
    sys.path.insert(0, str(script.resolve().parent))
    with importing(""):
        try:
            names = runpy.run_path(str(script), run_name=SCRIPT_NAME)
        except CallInImport as reached:
            names = vars(reached.module)
    # `deploy` looks there whether pods, which import a function by its name, find the same one.
    module = sys.modules[SCRIPT_NAME] = ModuleType(SCRIPT_NAME)
    vars(module).update(names)
    members = {id(value): value for value in names.values() if isinstance(value, (App, Remote))}
    return list(members.values())


def _logs(options: argparse.Namespace, kubectl: Kubectl) -> int:
    return run_attached(kubectl.plugin("logs", options.job, "--follow"))


def _results(options: argparse.Namespace, kubectl: Kubectl) -> int:
    results = attach(options.job, stream_logs=False, trust=options.trust)
    try:
        text = json.dumps(results, default=repr)
    except (TypeError, ValueError, RecursionError):  # of a pickle: keys that are no text, cycles
        text = json.dumps(repr(results))
    print(text)
    return 0


def _list(options: argparse.Namespace, kubectl: Kubectl) -> int:
    return _kubectl(kubectl.command("get", "torchrunjobs", "--selector", LABEL))


def _down(options: argparse.Namespace, kubectl: Kubectl) -> int:
    return _kubectl(kubectl.command("delete", "torchrunjobs", *options.job, "--wait=false"))


def _kubectl(command: list[str]) -> int:
    """Run kubectl, which prints its errors; the exit code."""
    code = run_attached(command)
    return code if code in (0, _INTERRUPTED) else _CLUSTER


if __name__ == "__main__":
    sys.exit(main())
