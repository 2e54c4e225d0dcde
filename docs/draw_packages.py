"""Draws docs/packages.svg, the picture of ARCHITECTURE.md: `make generate`.

The layers of reconcile come from the contract of import-linter in pyproject.toml.
"""

import tomllib
from pathlib import Path

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


def box(x: int, y: int, width: int, name: str, kind: str = "package") -> str:
    """A package; x and y are its upper left corner."""
    return (
        f'<rect class="{kind}" x="{x}" y="{y}" width="{width}" height="{BOX_HEIGHT}" rx="6"/>'
        f'<text x="{x + width // 2}" y="{y + 25}">{name}</text>'
    )


def label(x: int, y: int, words: str) -> str:
    """Text without a box that starts at x."""
    return f'<text class="label" x="{x}" y="{y}">{words}</text>'


def arrow(x1: int, y1: int, x2: int, y2: int, *, both: bool = False) -> str:
    """A line with a head at its end, or at both ends."""
    tail = ' marker-start="url(#head)"' if both else ""
    return f'<line x1="{x1}" y1="{y1}" x2="{x2}" y2="{y2}"{tail} marker-end="url(#head)"/>'


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
        '<rect class="frame" x="10" y="100" width="840" height="412" rx="8"/>',
        label(20, 120, "controller"),
        label(405, 120, "not shown: leader, serving, metrics, replay; manager and app start all"),
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
        f'<rect class="core" x="{LEFT}" y="{top}" width="{RIGHT - LEFT}" height="{height}"'
        ' rx="6"/>',
        label(LEFT + 10, top + 18, "reconcile: pure; a package imports only the rows below it"),
    ]
    for level, packages in enumerate(layers):
        whole = RIGHT - LEFT - 20
        width = (whole - gap * (len(packages) - 1)) // len(packages)
        for at, package in enumerate(packages):
            x, y = LEFT + 10 + at * (width + gap), top + 26 + level * row
            parts.append(
                f'<rect class="inner" x="{x}" y="{y}" width="{width}" height="30" rx="5"/>'
                f'<text x="{x + width // 2}" y="{y + 20}">{package}</text>'
            )
    return parts


def picture() -> str:
    """The packages and the pipeline as an SVG, on a light background."""
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}"'
            ' font-family="sans-serif" font-size="14" text-anchor="middle">',
            "<title>The packages of Torchrun Controller, and how a change passes them</title>",
            "<style>line{stroke:#334155;stroke-width:1.3}rect{stroke:#334155}.package{fill:#dbeafe}"
            ".other{fill:#e2e8f0}.frame{fill:#f8fafc}.core{fill:#fef3c7}.inner{fill:#fff}"
            "text{fill:#0f172a}.label{text-anchor:start;font-size:12px}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7"'
            ' markerHeight="7" orient="auto-start-reverse"><path d="M0 0L8 4L0 8z"'
            ' fill="#334155"/></marker></defs>',
            f'<rect width="{WIDTH}" height="{HEIGHT}" fill="#fff" stroke="none"/>',
            *outside(),
            *pipe(),
            *core(),
            box(10, 546, 840, "api: the kinds, names and the environment contract"),
            label(
                20, 534, "imported by controller, plugin, and the sync and serve pods of runtime"
            ),
            "</svg>",
            "",
        ]
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
