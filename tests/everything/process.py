"""The process of a suite, in a session of its own, so that it can be ended as a whole."""

import os
import signal
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

# The variables of `make all` itself; make reads them from its environment, too.
OWN = ("MAKEFLAGS", "MFLAGS", "MAKELEVEL", "MAKEOVERRIDES", "ONLY", "ARGS")
INTERRUPTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The suite ends its clusters after the first; another Ctrl-C does not wait so long.
ENDINGS = ((signal.SIGINT, 120.0), (signal.SIGTERM, 30.0), (signal.SIGKILL, 10.0))


def run(
    command: Sequence[str], root: Path, log: Path, extra: Mapping[str, str], limit: float
) -> str:
    """Run a command to its end. Returns what was wrong, "" for exit code 0.

    Raises:
        KeyboardInterrupt: after the processes have ended.
    """
    environment = {k: v for k, v in os.environ.items() if k not in OWN} | dict(extra)
    process: subprocess.Popen[bytes] | None = None
    try:
        with log.open("wb") as output, interrupts_deferred():
            process = subprocess.Popen(
                command,
                cwd=root,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        code = process.wait(limit)
    except (subprocess.TimeoutExpired, KeyboardInterrupt) as error:
        if process is not None:
            end(process)
        if isinstance(error, KeyboardInterrupt):
            raise
        return f"did not end within {limit / 60:.0f} min"
    return f"exit code {code}" if code else ""


@contextmanager
def interrupts_deferred() -> Iterator[None]:
    """Raise KeyboardInterrupt at the end of the block: inside Popen it would lose the process."""
    received: list[int] = []
    handlers = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in INTERRUPTS
    }
    try:
        yield
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    if received:
        raise KeyboardInterrupt


def end(process: subprocess.Popen[bytes]) -> None:
    """End the process and its children in the same group."""
    for number, patience in ENDINGS:
        try:
            os.killpg(process.pid, number)
            print(f"waiting up to {patience:.0f} s for its end; Ctrl-C does not wait", flush=True)
            process.wait(patience)
        except (subprocess.TimeoutExpired, KeyboardInterrupt):
            continue
        except ProcessLookupError:
            process.wait()
        break
    # Children that ignored the signal and outlive make.
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
