"""Shapes and colours of the pictures in docs/, as text SVG.

A picture is one file for both colour themes: its style sheet has a media query for the dark theme.
README pages and the site embed it as an image, and browsers evaluate the query inside an image as
well. A pair of files would need <picture>, and Sphinx does not copy the files that raw HTML names.
The background is opaque, so that a picture is readable on a page whose theme differs.
"""

from collections.abc import Iterable, Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Literal

Point = tuple[float, float]
Anchor = Literal["start", "middle", "end"]

SANS = "system-ui,-apple-system,'Segoe UI',Roboto,'Helvetica Neue',Arial,sans-serif"
MONO = "ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace"
# By selector: the declarations in the light and in the dark theme.
COLOURS: Mapping[str, tuple[str, str]] = {
    ".page": ("fill:#ffffff", "fill:#0f141b"),
    "text": ("fill:#0f172a", "fill:#e6edf3"),
    ".muted": ("fill:#526075", "fill:#9aa7b5"),
    ".frame": ("fill:#f8fafc;stroke:#cbd5e1", "fill:#151b23;stroke:#3d444d"),
    ".ours": ("fill:#dbeafe;stroke:#3b82f6", "fill:#12305c;stroke:#4b8df8"),
    ".other": ("fill:#e8edf3;stroke:#64748b", "fill:#262d37;stroke:#7d8998"),
    ".user": ("fill:#dcfce7;stroke:#16a34a", "fill:#0f3d24;stroke:#3fb950"),
    ".data": ("fill:#fef3c7;stroke:#d97706", "fill:#45310a;stroke:#d29922"),
    ".plain": ("fill:#ffffff;stroke:#94a3b8", "fill:#0f141b;stroke:#7d8998"),
    ".line": ("stroke:#475569", "stroke:#9aa7b5"),
    ".head": ("fill:#475569", "fill:#9aa7b5"),
    ".pale": ("stroke:#cbd5e1", "stroke:#4b5563"),
    ".number": ("fill:#1d4ed8", "fill:#4b8df8"),
    ".digit": ("fill:#ffffff", "fill:#0f141b"),
}
SHAPES = (
    ".line,.pale{fill:none;stroke-width:1.4}.dashed{stroke-dasharray:5 4}"
    ".small{font-size:13px}.strong{font-weight:600}"
    f".mono{{font-family:{MONO};font-size:12px}}"
)


def picture(
    width: int,
    height: int,
    title: str,
    parts: Iterable[str],
    *,
    styles: str = "",
    colours: Mapping[str, tuple[str, str]] | None = None,
) -> str:
    """The whole file. styles: more rules for both themes; colours: more of COLOURS."""
    themes = {**COLOURS, **(colours or {})}
    light = "".join(f"{selector}{{{rule}}}" for selector, (rule, _) in themes.items())
    dark = "".join(f"{selector}{{{rule}}}" for selector, (_, rule) in themes.items())
    return "\n".join(
        [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}" font-family="{SANS}" font-size="14" role="img"'
            ' aria-labelledby="title">',
            f'<title id="title">{escape(title, quote=False)}</title>',
            f"<style>{SHAPES}{styles}{light}@media(prefers-color-scheme:dark){{{dark}}}</style>",
            '<defs><marker id="head" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="10"'
            ' markerHeight="10" markerUnits="userSpaceOnUse" orient="auto-start-reverse">'
            '<path class="head" d="M0 0L8 4L0 8z"/></marker></defs>',
            f'<rect class="page" width="{width}" height="{height}" rx="8"/>',
            *parts,
            "</svg>",
            "",
        ]
    )


def text(x: float, y: float, content: str, kind: str = "", *, anchor: Anchor = "middle") -> str:
    """One line of text on the baseline y."""
    classes = f' class="{kind}"' if kind else ""
    anchored = "" if anchor == "start" else f' text-anchor="{anchor}"'
    return f'<text{classes} x="{x:g}" y="{y:g}"{anchored}>{escape(content, quote=False)}</text>'


def rectangle(
    x: float, y: float, width: float, height: float, kind: str, *, radius: int = 8
) -> str:
    """A rectangle with round corners; x and y are its upper left corner."""
    return (
        f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"'
        f' rx="{radius}"/>'
    )


def box(x: float, y: float, width: float, height: float, kind: str, name: str, *notes: str) -> str:
    """A rectangle with a name and smaller lines below it, in its center."""
    first = y + height / 2 + 5 - 8.5 * len(notes)
    lines = [
        text(x + width / 2, first + 17 * at, note, "small muted")
        for at, note in enumerate(notes, start=1)
    ]
    named = text(x + width / 2, first, name, "strong" if notes else "")
    return "".join([rectangle(x, y, width, height, kind), named, *lines])


def volume(
    x: float, y: float, width: float, height: float, kind: str, name: str, *notes: str
) -> str:
    """A cylinder, for storage."""
    dip = 9
    outline = (
        f'<path class="{kind}" d="M{x:g} {y + dip:g}v{height - 2 * dip:g}'
        f"a{width / 2:g} {dip} 0 0 0 {width:g} 0v{2 * dip - height:g}"
        f'a{width / 2:g} {dip} 0 0 0 {-width:g} 0a{width / 2:g} {dip} 0 0 0 {width:g} 0"/>'
    )
    first = y + dip / 2 + height / 2 + 6 - 8.5 * len(notes)
    lines = [
        text(x + width / 2, first + 17 * at, note, "small muted")
        for at, note in enumerate(notes, start=1)
    ]
    return "".join([outline, text(x + width / 2, first, name, "strong"), *lines])


def arrow(*points: Point, both: bool = False, kind: str = "line") -> str:
    """A line through the points with a head at its end, or at both ends."""
    tail = ' marker-start="url(#head)"' if both else ""
    return f'<path class="{kind}" d="{route(points)}"{tail} marker-end="url(#head)"/>'


def line(*points: Point, kind: str = "line") -> str:
    """A line through the points."""
    return f'<path class="{kind}" d="{route(points)}"/>'


def route(points: Sequence[Point]) -> str:
    """The `d` of a path."""
    return "M" + "L".join(f"{x:g} {y:g}" for x, y in points)


def number(x: float, y: float, value: int) -> str:
    """A step of a story: a digit in a disc around x and y."""
    return f'<circle class="number" cx="{x:g}" cy="{y:g}" r="9"/>' + text(
        x, y + 4, str(value), "digit small strong"
    )


def write(pictures: Iterable[tuple[Path, str]]) -> None:
    """Write files."""
    for path, content in pictures:
        path.write_text(content, encoding="utf-8")
