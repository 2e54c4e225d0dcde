"""Draws the Grafana dashboards from a recorded Prometheus: `make pictures`.

Grafana itself does not run here. The recording has the layout of each dashboard and the answers of
a real Prometheus to all of its queries.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import TypedDict

import charts
import svg
from charts import Area, Panel, Series

DOCS = Path(__file__).parent
RECORDING = DOCS / "recordings" / "dashboards.json"
WIDTH, COLUMNS, UNIT, GAP = 980, 24, 27, 8
EDGE, HEAD = 14, 44


class Place(TypedDict):
    """Grafana's gridPos."""

    x: int
    y: int
    w: int
    h: int


class RecordedSeries(TypedDict):
    """A series; the points have equal distances."""

    legend: str
    labels: dict[str, str]
    points: list[float | None]


class RecordedPanel(TypedDict):
    """A panel with the answers to its queries; a row has none."""

    title: str
    kind: str
    unit: str
    place: Place
    stacked: bool
    red_above: float | None
    red_below: float | None
    series: list[RecordedSeries]


class Board(TypedDict):
    """A dashboard. name: of its file in docs/."""

    name: str
    title: str
    seconds: float
    panels: list[RecordedPanel]


def area_of(place: Place) -> Area:
    """The pixels of a place on the grid."""
    column = (WIDTH - 2 * EDGE + GAP) / COLUMNS
    return Area(
        EDGE + place["x"] * column,
        HEAD + place["y"] * UNIT,
        place["w"] * column - GAP,
        place["h"] * UNIT - GAP,
    )


def draw(panel: RecordedPanel, seconds: float) -> list[str]:
    """A panel, or the heading of a row."""
    area = area_of(panel["place"])
    if panel["kind"] == "row":
        return [svg.text(area.x + 2, area.y + 17, panel["title"], "strong", anchor="start")]
    return charts.draw(
        Panel(
            panel["title"],
            panel["kind"],
            panel["unit"],
            seconds,
            tuple(Series(s["legend"], s["points"], s["labels"]) for s in panel["series"]),
            panel["stacked"],
            panel["red_above"],
            panel["red_below"],
        ),
        area,
    )


def picture(board: Board) -> str:
    """A dashboard as an SVG."""
    rows = max(panel["place"]["y"] + panel["place"]["h"] for panel in board["panels"])
    parts = [svg.text(EDGE + 2, 30, board["title"], "title", anchor="start")]
    for panel in board["panels"]:
        parts += draw(panel, board["seconds"])
    return svg.picture(
        WIDTH,
        HEAD + rows * UNIT + EDGE - GAP,
        f"The dashboard {board['title']} with data of a run of {board['seconds']:.0f} seconds",
        parts,
        styles=charts.STYLES + ".title{font-size:18px;font-weight:600}",
        colours=charts.COLOURS,
    )


def pictures() -> Iterator[tuple[Path, str]]:
    """The files and their contents."""
    boards: list[Board] = json.loads(RECORDING.read_text(encoding="utf-8"))
    for board in boards:
        yield DOCS / f"dashboard-{board['name']}.svg", picture(board)


if __name__ == "__main__":
    svg.write(pictures())
