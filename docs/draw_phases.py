"""Writes docs/phases.md and its picture from the tables of phases and steps: `make pictures`."""

import math
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path

import svg

from torchrun_api.status import PHASES, TERMINAL, Phase
from torchrun_controller.reconcile.job.steps import STEPS
from torchrun_controller.reconcile.model.phases import ROWS, TRANSITIONS, State

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "phases.md", DOCS / "phases.svg"
LIVE = tuple(phase for phase in PHASES if phase not in TERMINAL)
WIDTH, HEIGHT = 820, 520
CENTER, RADIUS = (300, 260), 205
BOX = (112, 36)
# Classes of svg.COLOURS. Other terminal phases are "failed", other phases are "other".
KINDS: dict[Phase, str] = {"Syncing": "data", "Running": "ours", "Succeeded": "user"}
USUAL = tuple(map(set, pairwise(("Pending", "Syncing", "Queued", "Running", "Succeeded"))))


def place(phase: Phase) -> tuple[float, float]:
    """The center of the box of a phase."""
    if phase in TERMINAL:
        return 730, 120 + 140 * sorted(TERMINAL).index(phase)
    # Clockwise from the left, so that the usual way of a job runs along the top.
    angle = math.radians(180 + 360 / len(LIVE) * LIVE.index(phase))
    return CENTER[0] + RADIUS * math.cos(angle), CENTER[1] + RADIUS * math.sin(angle)


def edge(start: tuple[float, float], end: tuple[float, float]) -> tuple[float, float]:
    """Where the line from the center of one box to another leaves the first."""
    across, down = end[0] - start[0], end[1] - start[1]
    sides = (BOX[0] / 2 + 4, BOX[1] / 2 + 4)
    share = min(
        sides[0] / abs(across) if across else math.inf, sides[1] / abs(down) if down else math.inf
    )
    return start[0] + share * across, start[1] + share * down


def arrow(origin: Phase, target: Phase, *, both: bool) -> str:
    """A line with a head at the target, or at both ends."""
    start, end = place(origin), place(target)
    (x1, y1), (x2, y2) = edge(start, end), edge(end, start)
    kind = "pale" if target in TERMINAL else "line" if both else "line one"
    if {origin, target} in USUAL:
        kind += " usual"
    return svg.arrow((round(x1), round(y1)), (round(x2), round(y2)), both=both, kind=kind)


def box(phase: Phase) -> str:
    """A phase."""
    x, y = place(phase)
    kind = KINDS.get(phase, "failed" if phase in TERMINAL else "other")
    return svg.box(round(x - BOX[0] / 2), round(y - BOX[1] / 2), *BOX, kind, phase)


def arrows() -> list[str]:
    """One for each transition, one for both directions between two phases."""
    drawn = []
    for origin in LIVE:
        for target in PHASES:
            back = origin in TRANSITIONS[target]
            if target in TRANSITIONS[origin] and not (back and target < origin):
                drawn.append(arrow(origin, target, both=back))
    return drawn


def picture() -> str:
    """The transitions as an SVG."""
    return svg.picture(
        WIDTH,
        HEIGHT,
        "Phases of a TorchrunJob and the transitions between them",
        [*arrows(), *map(box, PHASES)],
        styles=".usual{stroke-width:3}",
        colours={
            ".one": ("stroke:#b45309", "stroke:#d29922"),
            ".usual": ("stroke:#3b82f6", "stroke:#4b8df8"),
        },
    )


def page() -> str:
    """The page: the picture, the steps in their order, and what each state means."""
    lines = [
        "# Phases",
        "",
        "`status.phase` summarizes the current state of a job. This page shows which phase can",
        "follow which, how the controller decides, and what each phase means.",
        "",
        "![Phases and the transitions between them](phases.svg)",
        "",
        "Most jobs follow the thick blue lines. A line with two heads is a transition in both",
        "directions. Brown lines lead in one direction only. Pale lines lead to terminal phases,",
        "which never change. A job starts in Pending, or in the first phase that applies. If the",
        "controller is killed after it created a gang and before it wrote the status, it continues",
        "as if the phase were Queued. A job that is Pending because the Service of its new gang is",
        "refused continues in the same way.",
        "",
        "## How the controller decides",
        "",
        "The first step that applies decides. The order is the same for every attempt.",
        "",
        "| step | phases | what it does |",
        "|---|---|---|",
    ]
    for step in STEPS:
        name = step.decide.__name__.replace("_", " ")
        text = (step.decide.__doc__ or "").partition("\n")[0]
        lines.append(f"| {name} | {', '.join(step.leads_to)} | {text} |")
    lines += [
        "",
        "A job that is invalid at any step is Pending. During a resize the phase stays the same",
        "until the new gang is created.",
        "",
        "## What each phase means",
        "",
        "| phase | condition | state of the job |",
        "|---|---|---|",
    ]
    for phase in (*PHASES, None):
        for state in State:
            row = ROWS[state]
            if row.phase == phase:
                phase_name = phase or "unchanged"
                lines.append(f"| {phase_name} | {row.condition}={row.status} | {state.value} |")
    return "\n".join(lines) + "\n"


def pictures() -> Iterator[tuple[Path, str]]:
    """The file of the picture and its content."""
    yield PICTURE, picture()


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    svg.write(pictures())
