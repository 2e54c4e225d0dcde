"""Flame graphs: where the controller's CPU goes, from py-spy's samples, as small SVG pictures.

The picture of py-spy has about 300 KB of script and invisible frames. This one omits frames below
half a percent. Widths are shares of the samples, a frame is above its caller, and hovering shows
its full name.
"""

import asyncio
import contextlib
import html
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import uvloop

from torchrun_bench.competitors import CONTROLLER, Site
from torchrun_bench.http import Client
from torchrun_bench.options import Options
from torchrun_bench.processes import PYTHON, compiled_environment, settled
from torchrun_bench.profiles import CHURN, Purposes, busy, profile, save, short, tables
from torchrun_bench.profiles import CONTROLLER as CONTROLLER_PURPOSES
from torchrun_bench.report import Row, commit, say
from torchrun_bench.shapes import TARGET_NODES, site
from torchrun_bench.turns import WARM_UP, Load, watched

PICTURES = Path(__file__).resolve().parent.parent.parent / "docs" / "flames"
WIDTH, HEIGHT = 1200, 16  # width of the picture, height of a frame
LEAST = 0.005  # minimum share of the samples
RATE = 500  # samples per second


class Frame:
    """A function with its caller, and the number of samples with it on the stack."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.samples = 0
        self.callees: dict[str, Frame] = {}

    def add(self, stack: list[str], samples: int) -> None:
        """Add one line of collapsed stacks, the outermost caller first."""
        self.samples += samples
        if stack:
            self.callees.setdefault(stack[0], Frame(stack[0])).add(stack[1:], samples)


def read(collapsed: str) -> Frame:
    """Read the raw format of py-spy: frames between semicolons, then the number of samples."""
    root = Frame("all")
    for line in collapsed.splitlines():
        stack, _, samples = line.rpartition(" ")
        root.add([short(frame) for frame in stack.split(";")], int(samples))
    return root


def picture(root: Frame, title: str) -> str:
    """An SVG of text, without scripts."""
    boxes: list[str] = []
    depth = _draw(root, 0.0, 0, root.samples, boxes)
    height = (depth + 2) * HEIGHT
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}"'
            ' font-family="monospace" font-size="11">',
            f'<rect width="{WIDTH}" height="{height}" fill="#fff"/>',
            f'<text x="4" y="12">{html.escape(title)} ({root.samples} samples)</text>',
            *boxes,
            "</svg>\n",
        ]
    )


def _draw(frame: Frame, left: float, depth: int, whole: int, boxes: list[str]) -> int:
    """Draw a frame and its callees. Returns the depth of the deepest visible frame."""
    width, deepest = WIDTH * frame.samples / whole, depth
    share = f"{100 * frame.samples / whole:.1f}%"
    # The name determines the colour, so a function has the same colour everywhere.
    hue = 15 + sum(frame.name.encode()) % 40
    boxes.append(
        f'<g><title>{html.escape(frame.name)} {share}</title><rect x="{left:.1f}"'
        f' y="{(depth + 1) * HEIGHT}" width="{max(width - 0.5, 0.5):.1f}" height="{HEIGHT - 1}"'
        f' fill="hsl({hue},80%,70%)"/>'
    )
    letters = int(width / 6.8)
    if letters > 4:
        text = html.escape(frame.name[:letters])
        boxes.append(f'<text x="{left + 2:.1f}" y="{(depth + 1) * HEIGHT + 11}">{text}</text>')
    boxes.append("</g>")
    for callee in sorted(frame.callees.values(), key=lambda each: -each.samples):
        if callee.samples >= LEAST * whole:
            deepest = max(deepest, _draw(callee, left, depth + 1, whole, boxes))
            left += WIDTH * callee.samples / whole
    return deepest


@contextlib.contextmanager
def recording(pid: int, name: str, title: str) -> Iterator[None]:
    """Record a process until the end of the block, and store its picture."""
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        spy = _spy("--pid", str(pid), raw=raw)
        try:
            time.sleep(1)  # until it has started
            yield
        finally:
            spy.send_signal(2)
            spy.communicate(timeout=60)
        _keep(busy(raw.read_text()), name, title, CONTROLLER_PURPOSES)


def _spy(*what: str, raw: Path) -> "subprocess.Popen[bytes]":
    program = Path(sys.executable).with_name("py-spy")
    if not program.exists():
        raise RuntimeError(f"{program} is missing: make flames installs it")
    command = [str(program), "record", "--format", "raw", "--rate", str(RATE), "--output", str(raw)]
    return subprocess.Popen(
        [*command, *what], env=compiled_environment(), stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )  # fmt: skip


def _keep(lines: list[str], name: str, title: str, purposes: Purposes) -> None:
    """Store the picture and the shares, and print the shares."""
    PICTURES.mkdir(parents=True, exist_ok=True)
    path = PICTURES / f"{name}.svg"
    path.write_text(picture(read("\n".join(lines)), title))
    say(f"flames: {path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}")
    new_profile = profile(lines, purposes, title, commit())
    save(name, new_profile)
    print(f"\n{tables({name: new_profile})}", flush=True)


def flames(options: Options) -> list[Row]:
    """Part 8: pictures of the burst and of the churn. No figures."""
    with site("flames", options.teams) as on:
        uvloop.run(_burst(on, options))
    with tempfile.TemporaryDirectory() as folder:
        raw = Path(folder) / "raw"
        churn = ["-m", "torchrun_bench.churn", "controller", str(options.events), "0"]
        spy = _spy("--", PYTHON, *churn, raw=raw)
        output, _ = spy.communicate(timeout=600)
        if not raw.exists():
            raise RuntimeError(f"py-spy: {output.decode()[-500:]}")
        # Without the imports and the creation of frames.
        lines = raw.read_text().splitlines()
        prefix = "torchrun_bench/"
        fed = [
            line
            for line in lines
            if "Informer.run" in line and prefix not in line.rpartition(";")[2]
        ]
        _keep(fed, "churn", f"churn of {options.events} pod events", CHURN)
    return []


async def _burst(on: Site, options: Options) -> None:
    """Record the controller during a burst of gangs, until it is at rest."""
    client = Client(on.server)
    async with watched(on) as children:
        load = Load(client, children, CONTROLLER, TARGET_NODES, options.teams)
        with CONTROLLER.start(on, TARGET_NODES) as process:
            await asyncio.to_thread(process.until_ready)
            await load.burst("warm", WARM_UP)
            await asyncio.to_thread(settled, process.pid)
            title = f"burst of {options.burst} jobs of {TARGET_NODES} nodes: the controller's CPU"
            with recording(process.pid, "burst", title):
                await load.burst("flames", options.burst)
                await asyncio.to_thread(settled, process.pid)
    client.close()
