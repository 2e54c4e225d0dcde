"""`python -m torchrun_controller.replay record FILE` and `... plans FILE`."""

import argparse
import os
import sys
from collections.abc import Sequence
from datetime import UTC, datetime, timedelta
from functools import partial
from importlib.metadata import version
from pathlib import Path

import anyio

from torchrun_controller import logs
from torchrun_controller.cache.observe import Key
from torchrun_controller.client import ConfigError
from torchrun_controller.reconcile.model.observed import Defaults
from torchrun_controller.replay import __doc__ as description
from torchrun_controller.replay.play import Player
from torchrun_controller.replay.record import record
from torchrun_controller.replay.show import Printer
from torchrun_controller.replay.tape import Head, TapeError, read

MEGABYTE = 10**6


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one verb and return the exit code: 0, or 1 for an error, which is one line on stderr."""
    options = _parser().parse_args(arguments)
    logs.configure("warning", "auto")
    try:
        code: int = options.run(options)
    except BrokenPipeError:  # `... | head` has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (TapeError, ConfigError, OSError) as error:
        sys.stderr.write(f"replay: {error}\n")
        return 1
    return code


def _record(options: argparse.Namespace) -> int:
    head = Head(
        controller=version("torchrun-controller"),
        time=datetime.now(UTC),
        namespaces=tuple(filter(None, options.namespaces.split(","))),
        redacted=options.redact,
    )
    sys.stderr.write(f"recording to {options.file}; press Ctrl-C to stop\n")
    recording = partial(
        record,
        options.file,
        head,
        limit=options.limit * MEGABYTE,
        kubeconfig=options.kubeconfig,
        context=options.context,
    )
    tape = anyio.run(recording)
    full = f", and the limit of {options.limit} MB is reached" if tape.full.is_set() else ""
    sys.stderr.write(f"{tape.lines} lines in {options.file}{full}\n")
    return 0


def _plans(options: argparse.Namespace) -> int:
    defaults = Defaults(
        runtime_image=options.runtime_image,
        progress_url=options.progress_url,
        grow_after=timedelta(seconds=options.grow_after),
    )
    with options.file.open("rb") as file:
        head, lines = read(file)
        player = Player(defaults, head.namespaces)
        printer = Printer(sys.stdout, job=options.job, as_json=options.json, brief=options.brief)
        anyio.run(player.play, lines, printer.print_decision)
    if head.controller != (own_version := version("torchrun-controller")):
        sys.stderr.write(f"recorded with version {head.controller}, replayed with {own_version}\n")
    if player.ignored:
        sys.stderr.write(f"{player.ignored} lines have kinds that this version does not support\n")
    if not printer.printed:
        sys.stderr.write(
            "no Plans: check that the recording is complete and the name of the job is correct\n"
        )
    return 0


def _job(text: str) -> Key:
    namespace, slash, name = text.partition("/")
    if not (namespace and slash and name):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAMESPACE/NAME")
    return namespace, name


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        "python -m torchrun_controller.replay",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    verbs = parser.add_subparsers(required=True, metavar="VERB")
    record_parser = verbs.add_parser("record", help="record what the API server sends")
    record_parser.add_argument("file", type=Path, metavar="FILE")
    record_parser.add_argument("--namespaces", default="", help="separated by commas; default: all")
    record_parser.add_argument(
        "--kubeconfig", metavar="FILE", help="default: as for the controller"
    )
    record_parser.add_argument("--context", metavar="NAME")
    record_parser.add_argument("--limit", type=int, default=100, metavar="MB", help="default: 100")
    record_parser.add_argument(
        "--redact",
        action="store_true",
        help="replace commands and values of environment variables by ***",
    )
    record_parser.set_defaults(run=_record)
    plans_parser = verbs.add_parser("plans", help="print the decisions of reconcile")
    plans_parser.add_argument("file", type=Path, metavar="FILE")
    plans_parser.add_argument("--job", type=_job, metavar="NAMESPACE/NAME", help="only of this job")
    plans_parser.add_argument("--json", action="store_true", help="complete Plans, one per line")
    plans_parser.add_argument(
        "--brief", action="store_true", help="one line per Plan, without bodies"
    )
    settings = plans_parser.add_argument_group("settings of the controller that affect Plans")
    settings.add_argument("--runtime-image", default="torchrun-controller", metavar="IMAGE")
    settings.add_argument("--progress-url", default="", metavar="URL")
    settings.add_argument("--grow-after", type=float, default=300.0, metavar="SECONDS")
    plans_parser.set_defaults(run=_plans)
    return parser


if __name__ == "__main__":
    sys.exit(main())
