"""Writes docs/phases.md and its picture from the tables of phases and steps: `make generate`."""

import math
from pathlib import Path

from torchrun_api.status import PHASES, TERMINAL, Phase
from torchrun_controller.reconcile.job.steps import STEPS
from torchrun_controller.reconcile.model.phases import ROWS, TRANSITIONS, State

DOCS = Path(__file__).parent
PAGE, PICTURE = DOCS / "phases.md", DOCS / "phases.svg"
LIVE = tuple(phase for phase in PHASES if phase not in TERMINAL)
WIDTH, HEIGHT = 820, 520
CENTER, RADIUS = (300, 260), 205
BOX = (112, 36)
# Clockwise from the left, so that the usual way of a job runs along the top.
AROUND: dict[Phase, float] = {
    "Pending": 180,
    "Syncing": 240,
    "Queued": 300,
    "Running": 0,
    "Preempted": 60,
    "Suspended": 120,
}


def place(phase: Phase) -> tuple[float, float]:
    """The center of the box of a phase."""
    if phase in TERMINAL:
        return 730, 120 + 140 * sorted(TERMINAL).index(phase)
    angle = math.radians(AROUND[phase])
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
    kind = "end" if target in TERMINAL else "both" if both else "one"
    tail = ' marker-start="url(#head)"' if both else ""
    return (
        f'<line class="{kind}" x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}"'
        f'{tail} marker-end="url(#head)"/>'
    )


def box(phase: Phase) -> str:
    """A phase."""
    x, y = place(phase)
    kind = "terminal" if phase in TERMINAL else "live"
    return (
        f'<rect class="{kind}" x="{x - BOX[0] / 2:.0f}" y="{y - BOX[1] / 2:.0f}"'
        f' width="{BOX[0]}" height="{BOX[1]}" rx="6"/>'
        f'<text x="{x:.0f}" y="{y + 5:.0f}">{phase}</text>'
    )


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
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="15" text-anchor="middle">',
            "<title>Phases of a TorchrunJob and the transitions between them</title>",
            "<style>line{stroke:#64748b;stroke-width:1.3}line.one{stroke:#b45309}"
            "line.end{stroke:#cbd5e1}rect{stroke:#334155}.live{fill:#dbeafe}"
            ".terminal{fill:#e2e8f0}text{fill:#0f172a}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"'
            ' fill="#334155"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="none"/>',
            *arrows(),
            *map(box, PHASES),
            "</svg>",
            "",
        ]
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
        "A line with two heads is a transition in both directions. Brown lines lead in one",
        "direction only. Pale lines lead to terminal phases, which never change. A job starts in",
        "Pending, or in the first phase that applies. If the controller is killed after it created",
        "a gang and before it wrote the status, it continues as if the phase were Queued.",
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
                shown = phase or "unchanged"
                lines.append(f"| {shown} | {row.condition}={row.status} | {state.value} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
    PICTURE.write_text(picture(), encoding="utf-8")
