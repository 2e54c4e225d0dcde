"""Draws docs/stopping.svg, ranks that stop at the same call: `make pictures`.

RANKS is the declaration: when each rank enters its calls, in tenths of a second.
"""

from collections.abc import Iterator
from pathlib import Path

import svg

PICTURE = Path(__file__).with_name("stopping.svg")
WIDTH, HEIGHT = 720, 330
LEFT, TENTH = 150, 34  # the x of the first moment, and the width of a tenth of a second
TOP, ROW = 96, 44
NODES = ("node 0, leader", "node 1")
# The first call that is drawn, and the moment of each call; the last one is the answer.
FIRST_CALL = 47
RANKS = (
    (0.3, 3.4, 6.5, 9.6, 12.7),
    (0.6, 3.6, 6.6, 9.7, 12.9),
    (0.4, 3.5, 6.7, 9.5, 12.6),
    (0.8, 3.8, 6.9, 9.9, 13.0),
)
SIGNAL, COMMIT, END = 4.6, 5.4, 17.0
SAVE = 2.2
COLOURS = {".save": ("fill:#dcfce7;stroke:#16a34a", "fill:#0f3d24;stroke:#3fb950")}


def at(moment: float) -> float:
    """The x of a moment."""
    return LEFT + moment * TENTH


def row(rank: int) -> float:
    """The y of a rank; the nodes have some space between them."""
    return TOP + rank * ROW + (rank // 2) * 14


def calls(rank: int) -> list[str]:
    """The line of a rank with its calls, and the save after the last one."""
    y, moments = row(rank), RANKS[rank]
    last = moments[-1]
    parts = [
        svg.text(LEFT - 14, y + 5, f"rank {rank}", anchor="end"),
        svg.line((at(0), y), (at(last), y), kind="line"),
        svg.rectangle(at(last), y - 13, SAVE * TENTH, 26, "save", radius=4),
        svg.text(at(last + SAVE / 2), y + 5, "save, exit", "small"),
    ]
    for number, moment in enumerate(moments, start=FIRST_CALL):
        kind = "ours" if moment == last else "plain"
        parts.append(f'<circle class="{kind}" cx="{at(moment):g}" cy="{y:g}" r="6"/>')
        if rank == 0:
            parts.append(svg.text(at(moment), y - 16, f"call {number}", "small muted"))
    return parts


def moments() -> list[str]:
    """SIGTERM, which only one pod gets, and the agreement."""
    top, bottom = TOP - 34, row(len(RANKS) - 1) + 26
    return [
        svg.line((at(SIGNAL), top), (at(SIGNAL), bottom), kind="line dashed"),
        svg.text(at(SIGNAL) - 6, top - 26, "SIGTERM to node 1,", "strong", anchor="end"),
        svg.text(at(SIGNAL) - 6, top - 8, "held back", anchor="end"),
        svg.line((at(COMMIT), top), (at(COMMIT), bottom), kind="line dashed"),
        svg.text(
            at(COMMIT) + 6, top - 26, "all nodes have accepted call 51", "strong", anchor="start"
        ),
        svg.text(at(COMMIT) + 6, top - 8, "which no rank has reached", anchor="start"),
    ]


def picture() -> str:
    """The SVG."""
    frames: list[str] = []
    for node, name in enumerate(NODES):
        y = row(2 * node) - 24
        frames.append(svg.rectangle(14, y, WIDTH - 28, 2 * ROW + 4, "frame"))
        frames.append(svg.text(26, y + 2 * ROW - 6, name, "small muted", anchor="start"))
    parts = [part for rank in range(len(RANKS)) for part in calls(rank)]
    end = "stopping() returns None at each call before, and the seconds left at call 51."
    return svg.picture(
        WIDTH,
        HEIGHT,
        "Four ranks on two nodes stop at the same call of stopping()",
        [
            *frames,
            *moments(),
            *parts,
            svg.text(26, HEIGHT - 20, end, "small muted", anchor="start"),
        ],
        colours=COLOURS,
    )


def pictures() -> Iterator[tuple[Path, str]]:
    """The file and its content."""
    yield PICTURE, picture()


if __name__ == "__main__":
    svg.write(pictures())
