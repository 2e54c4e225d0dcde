"""Draws docs/terminal.svg from a recording of the plugin on a real cluster: `make pictures`.

The lines appear in the order and with the pauses of the recording; long pauses are shortened, and
the true time stands beside each line. Without animations the picture is the whole text.
"""

from collections.abc import Iterator
from html import escape
from pathlib import Path

import svg
from screen import Line, Screen, Span, read

DOCS = Path(__file__).parent
RECORDING, PICTURE = DOCS / "recordings" / "terminal.cast", DOCS / "terminal.svg"
CELL, ROW = 7.8, 19.0  # pixels of a character
LEFT, TOP, BAR = 20, 62, 36
TIMES = 64  # the width of the column of times
LONGEST_PAUSE = 1.2  # seconds
TYPING = 0.02  # seconds for each character of a command
COLOURS = {
    ".bar": ("fill:#e8edf3;stroke:#cbd5e1", "fill:#1f2630;stroke:#3d444d"),
    ".dot": ("fill:#b6c2d1", "fill:#4b5563"),
    ".red": ("fill:#b91c1c", "fill:#ff7b72"),
    ".green": ("fill:#15803d", "fill:#56d364"),
    ".yellow": ("fill:#a16207", "fill:#e3b341"),
    ".blue": ("fill:#1d4ed8", "fill:#79b8ff"),
    ".magenta": ("fill:#a21caf", "fill:#d2a8ff"),
    ".cyan": ("fill:#0e7490", "fill:#56d4dd"),
}
STYLES = (
    f"text{{font-family:{svg.MONO};font-size:13px;white-space:pre}}"
    ".bold{font-weight:700}.dim{opacity:.7}.italic{font-style:italic}"
    ".underline{text-decoration:underline}.time{font-size:11px}.command text{font-weight:600}"
    "@media(prefers-reduced-motion:no-preference){"
    "@keyframes appear{from{opacity:0}}@keyframes type{from{clip-path:inset(0 100% 0 0)}}"
    ".row{animation:appear .15s both}.command{animation-name:type}}"
)

RULES = STYLES + "".join(f"{selector}{{" for selector in COLOURS)


def delays(lines: list[Line]) -> list[float]:
    """When each line appears, in seconds after the start of the animation."""
    result, seconds, before = [], 0.0, 0.0
    for line in lines:
        seconds += min(max(line.seconds - before, 0.0), LONGEST_PAUSE)
        before = max(line.seconds, before)
        result.append(seconds)
        if line.marker:
            seconds += TYPING * len(line.cells)
    return result


def shown_times(lines: list[Line]) -> list[str]:
    """Seconds since the command of each line; blank where the line before shows the same."""
    result, start, last = [], 0.0, ""
    for line in lines:
        if line.marker:
            start, last = line.seconds, ""
            result.append("")
            continue
        seconds = f"{max(line.seconds - start, 0):.1f} s"
        result.append("" if seconds == last or not line.text() else seconds)
        last = seconds
    return result


def draw_line(line: Line, y: float, delay: float, seconds: str, right: float) -> str:
    """A line of the terminal with its time at the right edge, as one group that appears."""
    length = len(line.text())
    kind, style = "row", f"animation-delay:{delay:.2f}s"
    if line.marker:
        kind = "row command"
        style += f";animation-duration:{TYPING * length:.2f}s"
        style += f";animation-timing-function:steps({length})"
    parts = [draw_span(span, y) for span in line.spans()]
    if seconds:
        parts.append(svg.text(right, y, seconds, "muted time", anchor="end"))
    return f'<g class="{kind}" style="{style}">{"".join(parts)}</g>'


def draw_span(span: Span, y: float) -> str:
    """Text of one style; its width is fixed, so that columns are aligned in any font.

    Raises ValueError for a style without a rule.
    """
    if unknown := {name for name in span.style if f".{name}{{" not in RULES}:
        raise ValueError(f"no rule for {unknown}")
    kind = f' class="{" ".join(sorted(span.style))}"' if span.style else ""
    return (
        f'<text{kind} x="{LEFT + span.column * CELL:g}" y="{y:g}"'
        f' textLength="{len(span.text) * CELL:g}">{escape(span.text, quote=False)}</text>'
    )


def window(width: int, height: int) -> list[str]:
    """The frame of a terminal."""
    dots = [f'<circle class="dot" cx="{LEFT + 4 + 20 * at}" cy="18" r="6"/>' for at in range(3)]
    return [
        svg.rectangle(0.5, 0.5, width - 1, height - 1, "frame"),
        f'<path class="bar" d="M.5 {BAR}V8.5a8 8 0 0 1 8-8h{width - 17}a8 8 0 0 1 8 8V{BAR}z"/>',
        *dots,
    ]


def picture() -> str:
    """The SVG."""
    columns, events = read(RECORDING)
    lines = Screen.play(columns, events)
    width = round(2 * LEFT + columns * CELL + TIMES)
    height = round(TOP + len(lines) * ROW)
    rows = zip(lines, delays(lines), shown_times(lines), strict=True)
    return svg.picture(
        width,
        height,
        "A terminal: kubectl torchrun submits a job and explains why another one failed",
        [
            *window(width, height),
            *(
                draw_line(line, TOP + at * ROW, delay, seconds, width - LEFT)
                for at, (line, delay, seconds) in enumerate(rows)
                if line.text()
            ),
        ],
        styles=STYLES,
        colours=COLOURS,
    )


def pictures() -> Iterator[tuple[Path, str]]:
    """The file and its content."""
    yield PICTURE, picture()


if __name__ == "__main__":
    svg.write(pictures())
