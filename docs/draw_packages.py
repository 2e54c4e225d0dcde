"""Draws docs/packages.svg, the picture of ARCHITECTURE.md: `make pictures`.

The layers of reconcile come from the contract of import-linter in pyproject.toml.
"""

import tomllib
from collections.abc import Iterator
from pathlib import Path

import svg

ROOT = Path(__file__).parents[1]
PICTURE = ROOT / "docs" / "packages.svg"
WIDTH, HEIGHT = 860, 600
BOX_HEIGHT = 40
LEFT, RIGHT = 20, 840


def reconcile_layers() -> list[list[str]]:
    """The packages of reconcile, from the highest layer to the lowest."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
    contracts = settings["tool"]["importlinter"]["contracts"]
    layers = next(c["layers"] for c in contracts if c["name"] == "Packages of reconcile")
    return [[package.strip() for package in layer.replace("|", ":").split(":")] for layer in layers]


def box(x: int, y: int, width: int, name: str, kind: str = "ours") -> str:
    """A package; x and y are its upper left corner."""
    return svg.box(x, y, width, BOX_HEIGHT, kind, name)


def label(x: int, y: int, words: str) -> str:
    """Text without a box that starts at x."""
    return svg.text(x, y, words, "small muted", anchor="start")


def arrow(x1: int, y1: int, x2: int, y2: int, *, both: bool = False) -> str:
    """A line with a head at its end, or at both ends."""
    return svg.arrow((x1, y1), (x2, y2), both=both)


def outside() -> list[str]:
    """Clients of the API server, and the programs in a job's pods."""
    return [
        box(20, 20, 110, "sdk"),
        arrow(130, 40, 158, 40),
        box(160, 20, 110, "plugin"),
        arrow(270, 40, 338, 40, both=True),
        box(340, 20, 180, "API server", "other"),
        arrow(520, 40, 588, 40, both=True),
        box(590, 20, 110, "kubelet", "other"),
        arrow(700, 40, 728, 40, both=True),
        box(730, 20, 110, "runtime"),
        label(730, 78, "in the job's pods"),
    ]


def pipe() -> list[str]:
    """The packages that a change passes in the controller."""
    names = ("client", "watch", "cache", "workqueue", "controllers")
    width, gap = 140, 30
    parts = [
        svg.rectangle(10, 100, 840, 412, "frame"),
        label(20, 120, "controller"),
        label(290, 120, "not shown: leader, serving, metrics; manager and app start all"),
        arrow(390, 60, 90, 133),
        label(150, 88, "list and watch"),
        arrow(160, 133, 460, 60),
        label(405, 88, "server-side apply"),
    ]
    for at, name in enumerate(names):
        x = LEFT + at * (width + gap)
        parts.append(box(x, 135, width, name))
        if at:
            parts.append(arrow(x - gap, 155, x - 2, 155))
    parts += [
        arrow(470, 175, 470, 208),
        label(400, 196, "Observed"),
        arrow(760, 208, 760, 177),
        label(768, 196, "Plan"),
    ]
    return parts


def core() -> list[str]:
    """The packages of reconcile; each imports only those below it."""
    layers = reconcile_layers()
    top, gap, row = 212, 12, 38
    height = 24 + len(layers) * row
    parts = [
        svg.rectangle(LEFT, top, RIGHT - LEFT, height, "data"),
        label(LEFT + 10, top + 18, "reconcile: pure; a package imports only the rows below it"),
    ]
    for level, packages in enumerate(layers):
        whole = RIGHT - LEFT - 20
        width = (whole - gap * (len(packages) - 1)) // len(packages)
        for at, package in enumerate(packages):
            x, y = LEFT + 10 + at * (width + gap), top + 26 + level * row
            parts.append(svg.box(x, y, width, 30, "plain", package))
    return parts


def picture() -> str:
    """The packages and the pipeline as an SVG."""
    return svg.picture(
        WIDTH,
        HEIGHT,
        "The packages of Torchrun Controller, and how a change passes them",
        [
            *outside(),
            *pipe(),
            *core(),
            box(10, 546, 840, "api: the kinds, names and the environment contract"),
            label(
                20, 534, "imported by controller, plugin, and the sync and serve pods of runtime"
            ),
        ],
    )


def pictures() -> Iterator[tuple[Path, str]]:
    """The file and its content."""
    yield PICTURE, picture()


if __name__ == "__main__":
    svg.write(pictures())
