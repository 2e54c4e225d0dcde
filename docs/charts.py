"""Panels of a dashboard as SVG: charts over time, numbers, tables and bars, as in Grafana."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import svg

PALETTE = (
    ("#2563eb", "#60a5fa"),
    ("#ea580c", "#fb923c"),
    ("#16a34a", "#4ade80"),
    ("#9333ea", "#c084fc"),
    ("#dc2626", "#f87171"),
    ("#0891b2", "#22d3ee"),
    ("#a16207", "#facc15"),
    ("#db2777", "#f472b6"),
)
COLOURS = {
    **{f".s{at}": (f"stroke:{one}", f"stroke:{other}") for at, (one, other) in enumerate(PALETTE)},
    **{f".f{at}": (f"fill:{one}", f"fill:{other}") for at, (one, other) in enumerate(PALETTE)},
    ".good": ("fill:#15803d", "fill:#56d364"),
    ".bad": ("fill:#b91c1c", "fill:#ff7b72"),
    ".grid": ("stroke:#e2e8f0", "stroke:#2b333d"),
}
STYLES = (
    ".curve{fill:none;stroke-width:1.5;stroke-linejoin:round}.area{stroke:none;opacity:.35}"
    ".spark{stroke:none;opacity:.18}.grid{fill:none;stroke-width:1}.tick{font-size:11px}"
    ".value{font-size:26px;font-weight:600}.heading{font-size:13px;font-weight:600}"
)
CHARACTER = 6.6  # pixels of text of 11 pixels, with room to spare
MARGIN = 10
SECONDS = ((3600.0, "h"), (60.0, "min"), (1.0, "s"), (1e-3, "ms"), (1e-6, "µs"), (0.0, "s"))
COUNTS = ((1e9, "G"), (1e6, "M"), (1e3, "K"), (0.0, ""))
BYTES = ((1e9, "GB"), (1e6, "MB"), (1e3, "kB"), (0.0, "B"))
MINUTES = (30.0, 60.0, 120.0, 300.0, 600.0, 1200.0, 1800.0, 3600.0)  # seconds between ticks
SCALES = {"s": SECONDS, "bytes": BYTES, "Bps": BYTES}
SUFFIXES = {"ops": "/s", "reqps": "/s", "Bps": "/s"}

Points = Sequence[float | None]


@dataclass(frozen=True)
class Series:
    """Values at equal distances; None where there is none. labels: for tables."""

    legend: str
    points: Points
    labels: dict[str, str] = field(default_factory=dict)

    @property
    def last(self) -> float | None:
        """The last value."""
        return next((value for value in reversed(self.points) if value is not None), None)


@dataclass(frozen=True)
class Panel:
    """A panel and the answers to its queries. unit: Grafana's name; seconds: of the whole range.

    red_above, red_below: bounds of the value of a number.
    """

    title: str
    kind: str
    unit: str
    seconds: float
    series: tuple[Series, ...]
    stacked: bool = False
    red_above: float | None = None
    red_below: float | None = None


@dataclass(frozen=True)
class Area:
    """A rectangle of the picture, in pixels."""

    x: float
    y: float
    width: float
    height: float

    @property
    def right(self) -> float:
        """The x of its right edge."""
        return self.x + self.width

    @property
    def bottom(self) -> float:
        """The y of its lower edge."""
        return self.y + self.height


def draw(panel: Panel, area: Area) -> list[str]:
    """A card with the panel in it."""
    card = [
        svg.rectangle(area.x, area.y, area.width, area.height, "frame", radius=6),
        svg.text(
            area.x + MARGIN, area.y + 20, fit(panel.title, area.width, 7.6), "heading",
            anchor="start",
        ),
    ]  # fmt: skip
    inner = Area(
        area.x + MARGIN, area.y + 32, area.width - 2 * MARGIN, area.height - 32 - MARGIN / 2
    )
    drawn = {"timeseries": chart, "stat": number, "table": table, "bargauge": bars}[panel.kind]
    return [*card, *drawn(panel, inner)]


def show(value: float, unit: str) -> str:
    """A value with at most three digits and its unit."""
    if unit == "percentunit":
        return f"{digits(100 * value)} %"
    scale = SCALES.get(unit, COUNTS)
    factor, name = next((factor, name) for factor, name in scale if abs(value) >= factor)
    space = " " if unit in SCALES else ""
    return f"{digits(value / (factor or 1))}{space}{name}{SUFFIXES.get(unit, '')}"


def digits(value: float) -> str:
    """A number with three digits, fewer if they are zeros, and all before the point."""
    if abs(value) >= 100:
        return f"{value:.0f}"
    return f"{value:.3g}" if abs(value) >= 1e-4 or value == 0 else f"{value:.0e}"


def fit(text: str, width: float, character: float = CHARACTER) -> str:
    """The text, cut to the width in pixels."""
    most = int((width - 2 * MARGIN) / character)
    return text if len(text) <= most else text[: most - 1] + "…"


def top_of_axis(highest: float, unit: str = "short") -> tuple[float, float]:
    """The end of an axis from 0 that shows the value, and the distance of its ticks."""
    if highest <= 0:
        return 1.0, 0.5
    rough = highest / 3
    magnitude: float = 10 ** math.floor(math.log10(rough))
    steps = [m * magnitude for m in (1, 2, 2.5, 5, 10)]
    if unit == "s" and 60 < highest <= 3 * MINUTES[-1]:
        steps = list(MINUTES)
    step = next(step for step in steps if step >= rough * 0.999)
    return step * math.ceil(highest / step * 0.999), step


def chart(panel: Panel, area: Area) -> list[str]:
    """Lines over time, or areas on top of each other, and their names below."""
    rows, entries = legend(panel.series, area)
    plot = Area(area.x + 46, area.y + 2, area.width - 58, area.height - 26 - 16 * rows)
    layers = stack(panel.series) if panel.stacked else [series.points for series in panel.series]
    highest = max((value for points in layers for value in points if value is not None), default=0)
    top, step = top_of_axis(highest, panel.unit)
    parts = axes(panel, plot, top, step)
    curves = [place(points, plot, top) for points in layers]
    if panel.stacked:
        below = [(plot.x, plot.bottom), (plot.right, plot.bottom)]
        for at, (run,) in enumerate(curves):
            parts.append(band(run, below, f"area f{at % 8}"))
            below = run
    for at in reversed(range(len(curves))):
        parts += [curve(run, f"curve s{at % 8}") for run in curves[at]]
    return [*parts, *entries]


def stack(series: Sequence[Series]) -> list[list[float | None]]:
    """Each series on top of those before it; no value counts as 0."""
    totals = [0.0] * max((len(each.points) for each in series), default=0)
    layers: list[list[float | None]] = []
    for each in series:
        totals = [total + (value or 0) for total, value in zip(totals, each.points, strict=True)]
        layers.append(list(totals))
    return layers


def axes(panel: Panel, plot: Area, top: float, step: float) -> list[str]:
    """Lines and labels of values, and labels of minutes."""
    parts = []
    for at in range(round(top / step) + 1):
        y = plot.bottom - plot.height * at * step / top
        parts += [
            svg.line((plot.x, y), (plot.right, y), kind="grid"),
            svg.text(plot.x - 6, y + 4, show(at * step, panel.unit), "muted tick", anchor="end"),
        ]
    minutes = int(panel.seconds // 60)
    for minute in range(minutes + 1):
        x = plot.x + plot.width * 60 * minute / panel.seconds
        parts.append(svg.text(x, plot.bottom + 15, f"{minute}:00", "muted tick"))
    return parts


def place(points: Points, plot: Area, top: float) -> list[list[svg.Point]]:
    """The points in the plot, as runs without gaps."""
    runs: list[list[svg.Point]] = [[]]
    for at, value in enumerate(points):
        if value is None:
            runs.append([])
        else:
            x = plot.x + plot.width * at / max(len(points) - 1, 1)
            y = plot.bottom - plot.height * min(value / top, 1)
            runs[-1].append((round(x, 1), round(y, 1)))
    return [run for run in runs if run]


def curve(run: list[svg.Point], kind: str) -> str:
    """A line, or a dash for a single point."""
    if len(run) == 1:
        run = [run[0], (run[0][0] + 1, run[0][1])]
    return f'<path class="{kind}" d="{svg.route(run)}"/>'


def band(upper: list[svg.Point], lower: list[svg.Point], kind: str) -> str:
    """The area between two lines."""
    return f'<path class="{kind}" d="{svg.route([*upper, *reversed(lower)])}"/>'


def legend(series: Sequence[Series], area: Area) -> tuple[int, list[str]]:
    """The number of rows, at most two, and the names in them; the rest is counted."""
    places: list[tuple[float, int]] = []
    x, row = 0.0, 0
    for each in series:
        width = 18 + CHARACTER * len(each.legend)
        if x and x + width > area.width:
            x, row = 0.0, row + 1
        places.append((x, row))
        x += width + 8
    rows = min(row + 1, 2)
    first = area.bottom - 16 * rows + 8
    visible = [at for at, (_, row) in enumerate(places) if row < 2]
    hidden_count = len(series) - len(visible)
    if hidden_count and visible:
        hidden_count += 1
        visible.pop()
    parts = []
    for at in visible:
        x, row = places[at]
        y = first + 16 * row
        parts += [
            svg.rectangle(area.x + x, y - 5, 10, 4, f"f{at % 8}", radius=1),
            svg.text(
                area.x + x + 14, y, fit(series[at].legend, area.width), "muted tick",
                anchor="start",
            ),
        ]  # fmt: skip
    if hidden_count:
        x, row = places[len(visible)]
        parts.append(
            svg.text(
                area.x + x, first + 16 * min(row, 1), f"and {hidden_count} more", "muted tick",
                anchor="start",
            )
        )  # fmt: skip
    return rows, parts


def number(panel: Panel, area: Area) -> list[str]:
    """The last value, coloured by its bounds, over a small curve."""
    parts = []
    several = len(panel.series) > 1
    for at, series in enumerate(panel.series):
        column = Area(
            area.x + area.width * at / len(panel.series), area.y,
            area.width / len(panel.series), area.height,
        )  # fmt: skip
        highest = max((value for value in series.points if value is not None), default=0)
        bad = is_red(panel, series.last)
        small = Area(column.x, column.y + column.height / 2, column.width, column.height / 2)
        kind = f"spark {'bad' if bad else 'good'}"
        if len(series.points) > 1:
            for run in place(series.points, small, highest or 1):
                base = [(run[0][0], small.bottom), (run[-1][0], small.bottom)]
                parts.append(band(run, base, kind))
        middle = column.x + column.width / 2
        value = "no data" if series.last is None else show(series.last, panel.unit)
        parts.append(
            svg.text(middle, column.y + 34, value, f"value {'bad' if bad else 'good'}")
            if not several
            else svg.text(middle, column.y + 30, value, "heading good")
        )
        if series.legend:
            name = fit(series.legend, column.width + 2 * MARGIN)
            parts.append(svg.text(middle, column.y + 52, name, "muted tick"))
    return parts


def is_red(panel: Panel, value: float | None) -> bool:
    """Whether a value is out of its bounds."""
    if value is None:
        return True
    above = panel.red_above is not None and value >= panel.red_above
    return above or (panel.red_below is not None and value < panel.red_below)


def table(panel: Panel, area: Area) -> list[str]:
    """Labels and the value, as many rows as there is room for."""
    names = sorted({name for series in panel.series for name in series.labels})
    width = area.width / (len(names) + 1)
    cells = [[*names, "value"]]
    for series in panel.series:
        value = "" if series.last is None else show(series.last, panel.unit)
        cells.append([*(series.labels.get(name, "") for name in names), value])
    parts = []
    for row, line in enumerate(cells[: int(area.height // 20)]):
        y = area.y + 14 + 20 * row
        kind = "tick" if row else "muted tick"
        parts += [
            svg.text(area.x + at * width, y, fit(cell, width + 14), kind, anchor="start")
            for at, cell in enumerate(line)
        ]
        parts.append(svg.line((area.x, y + 6), (area.right, y + 6), kind="grid"))
    return parts


def bars(panel: Panel, area: Area) -> list[str]:
    """A horizontal bar for each value."""
    highest = max((series.last or 0 for series in panel.series), default=0) or 1
    parts = []
    for row, series in enumerate(panel.series[: int(area.height // 34)]):
        y = area.y + 14 + 34 * row
        value = series.last or 0
        parts += [
            svg.text(area.x, y, fit(series.legend, area.width - 60), "tick", anchor="start"),
            svg.text(area.right, y, show(value, panel.unit), "tick", anchor="end"),
            svg.rectangle(
                area.x, y + 5, max(area.width * value / highest, 2), 10, f"f{row % 8}", radius=3
            ),
        ]
    return parts
