"""Draws docs/sequence.svg, the life of a job: `make pictures`.

RUN is the declaration: who takes part, and who does what in each phase.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import svg

from torchrun_api.kinds.status import Phase

PICTURE = Path(__file__).with_name("sequence.svg")
WIDTH = 980
FIRST, SPACE = 164, 144  # of the lifelines
TOP, ROW, PAD = 84, 36, 14  # the first stage, a message, above and below the messages of a stage
BOX = (136, 54)
# The outline of a label covers the lifelines behind it.
STYLES = ".label{paint-order:stroke;stroke-width:5px;stroke-linejoin:round;font-size:13px}"
COLOURS = {
    ".label": ("fill:#0f172a;stroke:#f8fafc", "fill:#e6edf3;stroke:#151b23"),
    ".via": ("fill:#f8fafc;stroke:#475569", "fill:#151b23;stroke:#9aa7b5"),
}
LEGEND = "Dashed: a change that the target watches. Circle: forwarded by the API server."


@dataclass(frozen=True)
class Actor:
    """A lifeline; kind: a class of svg.COLOURS."""

    name: str
    note: str
    kind: str


LAPTOP = Actor("Laptop", "kubectl torchrun", "user")
API = Actor("API server", "all objects", "other")
CONTROLLER = Actor("Controller", "one replica leads", "ours")
SYNC = Actor("Sync pod", "workspace PVC", "data")
KUBERNETES = Actor("Kubernetes", "controllers, nodes", "other")
PODS = Actor("Pods", "launcher, torchrun", "user")
ACTORS = (LAPTOP, API, CONTROLLER, SYNC, KUBERNETES, PODS)


@dataclass(frozen=True)
class Message:
    """What one actor does to another, or alone if both are the same.

    via: the actor that forwards it. sees: the message is a change that the target watches.
    """

    source: Actor
    target: Actor
    label: str
    via: Actor | None = None
    sees: bool = False


@dataclass(frozen=True)
class Stage:
    """The messages while `status.phase` is `phase`; kind: a class of svg.COLOURS."""

    phase: Phase
    kind: str
    messages: tuple[Message, ...]


RUN = (
    Stage(
        "Pending",
        "other",
        (
            Message(LAPTOP, API, "create TorchrunJob"),
            Message(API, CONTROLLER, "new job", sees=True),
        ),
    ),
    Stage(
        "Syncing",
        "data",
        (
            Message(CONTROLLER, API, "PVC and sync pod"),
            Message(LAPTOP, SYNC, "changed files", via=API),
            Message(SYNC, SYNC, "verify and write"),
            Message(SYNC, CONTROLLER, "exit 0, SHA-256", sees=True),
        ),
    ),
    Stage(
        "Queued",
        "other",
        (
            Message(CONTROLLER, API, "Indexed Job, Service"),
            Message(KUBERNETES, PODS, "create and start"),
            Message(CONTROLLER, API, "annotation: start"),
            Message(API, PODS, "the gate opens", sees=True),
        ),
    ),
    Stage(
        "Running",
        "ours",
        (
            Message(PODS, PODS, "copy the code to /app"),
            Message(PODS, PODS, "torchrun starts the ranks"),
            Message(PODS, LAPTOP, "logs of all ranks", via=API),
        ),
    ),
    Stage(
        "Succeeded",
        "user",
        (
            Message(PODS, CONTROLLER, "exit 0 of each pod", sees=True),
            Message(CONTROLLER, API, "status"),
            Message(API, LAPTOP, "Succeeded, exit 0", sees=True),
        ),
    ),
)


def lifeline(actor: Actor) -> float:
    """The x of an actor."""
    return FIRST + SPACE * ACTORS.index(actor)


def height(stage: Stage) -> int:
    """The height of the band of a stage."""
    return ROW * len(stage.messages) + 2 * PAD


def heads() -> list[str]:
    """The boxes above the lifelines."""
    width, tall = BOX
    return [
        svg.box(lifeline(actor) - width / 2, 14, width, tall, actor.kind, actor.name, actor.note)
        for actor in ACTORS
    ]


def band(stage: Stage, y: float) -> list[str]:
    """The background and the name of a phase."""
    return [
        svg.rectangle(14, y + 3, WIDTH - 28, height(stage) - 6, "frame"),
        svg.rectangle(14, y + 3, 7, height(stage) - 6, stage.kind, radius=3),
        svg.text(32, y + height(stage) / 2 + 5, stage.phase, "strong", anchor="start"),
    ]


def message(item: Message, y: float) -> list[str]:
    """An arrow at the height y with its label above it."""
    kind = "line dashed" if item.sees else "line"
    start, end = lifeline(item.source), lifeline(item.target)
    if start == end:
        return itself(item, start, y)
    ahead = 1 if end > start else -1
    parts = [svg.arrow((start, y), (end - 2 * ahead, y), kind=kind)]
    if item.via is not None:
        parts.append(f'<circle class="via" cx="{lifeline(item.via):g}" cy="{y:g}" r="4.5"/>')
    # In the middle of the last space of a long arrow, where the target is.
    middle = (start + end) / 2 if abs(end - start) <= SPACE else end - ahead * SPACE / 2
    return [*parts, svg.text(middle, y - 6, item.label, "label")]


def itself(item: Message, x: float, y: float) -> list[str]:
    """A loop at a lifeline; its label is beside it, to the left at the last lifeline."""
    side = -1 if item.source is ACTORS[-1] else 1
    anchor: svg.Anchor = "end" if side < 0 else "start"
    loop = svg.arrow((x, y - 14), (x + 24 * side, y - 14), (x + 24 * side, y), (x + 2 * side, y))
    return [loop, svg.text(x + 32 * side, y - 3, item.label, "label", anchor=anchor)]


def picture() -> str:
    """The SVG."""
    bottom = TOP + sum(map(height, RUN))
    bands: list[str] = []
    messages: list[str] = []
    y = float(TOP)
    for stage in RUN:
        bands += band(stage, y)
        for row, item in enumerate(stage.messages, start=1):
            messages += message(item, y + PAD + row * ROW - 8)
        y += height(stage)
    lines = [
        svg.line((lifeline(actor), 14 + BOX[1]), (lifeline(actor), bottom), kind="pale")
        for actor in ACTORS
    ]
    return svg.picture(
        WIDTH,
        bottom + 36,
        "A run from kubectl torchrun to Succeeded, phase by phase",
        [
            *bands,
            *lines,
            *heads(),
            *messages,
            svg.text(26, bottom + 22, LEGEND, "small muted", anchor="start"),
        ],
        styles=STYLES,
        colours=COLOURS,
    )


def pictures() -> Iterator[tuple[Path, str]]:
    """The file and its content."""
    yield PICTURE, picture()


if __name__ == "__main__":
    svg.write(pictures())
