"""Panels and dashboards in Grafana's JSON model.

https://grafana.com/docs/grafana/latest/dashboards/build-dashboards/view-dashboard-json-model/
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

SCHEMA_VERSION = 41  # the version of Grafana 12; other versions migrate it
DATASOURCE = {"type": "prometheus", "uid": "${datasource}"}
COLUMNS = 24

Json = dict[str, Any]


@dataclass(frozen=True)
class Panel:
    """One panel. `queries` are pairs of PromQL and legend; `unit` is a name of Grafana.

    `kind` is timeseries, stat, table or bargauge; `instant` requests only the value at the
    end of the range. `yellow_above`, `red_above` and `red_below` colour a number, from that value
    on. `decimals` is for the unit short: most panels count whole things.
    """

    title: str
    description: str
    queries: tuple[tuple[str, str], ...]
    unit: str = "short"
    kind: str = "timeseries"
    width: int = 8
    height: int = 7
    stacked: bool = False
    instant: bool = False
    decimals: int = 0
    yellow_above: float | None = None
    red_above: float | None = None
    red_below: float | None = None
    # Of a table: the heading of the values, and a text with a colour for some of them.
    value: str = "Value"
    texts: tuple[tuple[str, str, str], ...] = ()


def tile(
    title: str,
    description: str,
    query: str,
    unit: str = "short",
    *,
    instant: bool = False,
    yellow_above: float | None = None,
    red_above: float | None = None,
    red_below: float | None = None,
) -> Panel:
    """One number with a colour."""
    return Panel(
        title, description, ((query, ""),), unit, "stat", width=4, height=4, instant=instant,
        yellow_above=yellow_above, red_above=red_above, red_below=red_below,
    )  # fmt: skip


@dataclass(frozen=True)
class Row:
    """A heading and the panels below it."""

    title: str
    panels: tuple[Panel, ...]


@dataclass(frozen=True)
class Variable:
    """A drop-down list above the panels with the values of a label.

    With `newest`, the value whose series is the youngest in the time range comes first, and is
    selected when the dashboard opens.
    """

    name: str
    label: str
    metric: str  # with its selector
    of: str
    multi: bool = True
    newest: bool = False


def dashboard(
    uid: str, title: str, description: str, variables: Sequence[Variable], rows: Sequence[Row]
) -> Json:
    """The dashboard, with panels numbered and placed in reading order."""
    return {
        "uid": uid,
        "title": title,
        "description": description,
        "tags": ["torchrun", "kubernetes"],
        "schemaVersion": SCHEMA_VERSION,
        "version": 1,
        "editable": True,
        "graphTooltip": 1,
        "refresh": "30s",
        "time": {"from": "now-6h", "to": "now"},
        "timezone": "browser",
        "annotations": {"list": []},
        "links": [
            {
                "type": "dashboards",
                "title": "Torchrun",
                "tags": ["torchrun"],
                "asDropdown": True,
                "includeVars": True,
                "keepTime": True,
            }
        ],
        "templating": {"list": [_datasource(), *map(_variable, variables)]},
        "panels": _placed(rows),
    }


def _placed(rows: Sequence[Row]) -> list[Json]:
    placed: list[Json] = []
    y = 0
    for row in rows:
        placed.append(_row(row.title, len(placed) + 1, y))
        x, y, tallest = 0, y + 1, 0
        for panel in row.panels:
            if x + panel.width > COLUMNS:
                x, y, tallest = 0, y + tallest, 0
            place = {"x": x, "y": y, "w": panel.width, "h": panel.height}
            placed.append(_panel(panel, len(placed) + 1, place))
            x, tallest = x + panel.width, max(tallest, panel.height)
        y += tallest
    return placed


def _row(title: str, number: int, y: int) -> Json:
    place = {"x": 0, "y": y, "w": COLUMNS, "h": 1}
    return {"id": number, "type": "row", "title": title, "collapsed": False, "gridPos": place,
            "panels": []}  # fmt: skip


def _panel(panel: Panel, number: int, place: Json) -> Json:
    instant = panel.instant or panel.kind in ("table", "bargauge")
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "targets": [
            {
                "refId": chr(ord("A") + index),
                "datasource": DATASOURCE,
                "editorMode": "code",
                "expr": expr,
                "legendFormat": legend or "__auto",
                "instant": instant,
                "range": not instant,
                "exemplar": "_bucket" in expr,
                **({"format": "table"} if panel.kind == "table" else {}),
            }
            for index, (expr, legend) in enumerate(panel.queries)
        ],
        "fieldConfig": {"defaults": _defaults(panel), "overrides": _overrides(panel)},
        "options": _options(panel),
        **({"transformations": _columns(panel)} if panel.kind == "table" else {}),
    }


HEADINGS = {
    "job_namespace": "Namespace",
    "queue": "Queue",
    "reason": "Reason",
    "phase": "Phase",
}
# Grafana's own choice of colours depends on the order of the series.
PHASE_COLOURS = {
    "Running": "green",
    "Succeeded": "dark-green",
    "Pending": "dark-yellow",
    "Syncing": "light-blue",
    "Queued": "yellow",
    "Suspended": "text",
    "Preempted": "orange",
    "Failed": "red",
    "TimedOut": "dark-red",
}


def _columns(panel: Panel) -> list[Json]:
    """A table of labels and one value; Grafana's time column is of no use here."""
    names = {**HEADINGS, "Value": panel.value}
    options = {"excludeByName": {"Time": True}, "renameByName": names}
    return [{"id": "organize", "options": options}]


def _overrides(panel: Panel) -> list[Json]:
    """Fixed colours for series that are phases, and texts in place of numbers in tables."""
    if panel.texts:
        mapped = {
            value: {"index": index, "text": text, "color": colour}
            for index, (value, text, colour) in enumerate(panel.texts)
        }
        properties: list[Json] = [
            {"id": "mappings", "value": [{"type": "value", "options": mapped}]},
            {"id": "custom.cellOptions", "value": {"type": "color-text"}},
        ]
        return [_override(panel.value, properties)]
    if not any("{{phase}}" in legend for _, legend in panel.queries):
        return []
    legends = [legend for _, legend in panel.queries]
    return [
        _override(
            legend.replace("{{phase}}", phase),
            [{"id": "color", "value": {"mode": "fixed", "fixedColor": colour}}],
        )
        for legend in legends
        for phase, colour in PHASE_COLOURS.items()
    ]


def _override(name: str, properties: list[Json]) -> Json:
    return {"matcher": {"id": "byName", "options": name}, "properties": properties}


def _defaults(panel: Panel) -> Json:
    defaults: Json = {"unit": panel.unit, "min": 0}
    if panel.unit == "short":
        defaults["decimals"] = panel.decimals
    if panel.kind == "timeseries":
        stacking = {"mode": "normal" if panel.stacked else "none", "group": "A"}
        fill = 40 if panel.stacked else 5
        defaults["custom"] = {"fillOpacity": fill, "stacking": stacking, "showPoints": "never"}
    steps: list[Json] = [{"color": "green", "value": None}]
    if panel.yellow_above is not None:
        steps.append({"color": "yellow", "value": panel.yellow_above})
    if panel.red_above is not None:
        steps.append({"color": "red", "value": panel.red_above})
    if panel.red_below is not None:
        steps = [{"color": "red", "value": None}, {"color": "green", "value": panel.red_below}]
    defaults["thresholds"] = {"mode": "absolute", "steps": steps}
    return defaults


def _options(panel: Panel) -> Json:
    reduce = {"calcs": ["lastNotNull"], "fields": "", "values": False}
    if panel.kind == "timeseries":
        return {
            "legend": {"displayMode": "list", "placement": "bottom", "showLegend": True},
            "tooltip": {"mode": "multi", "sort": "desc"},
        }
    if panel.kind == "stat":
        return {"reduceOptions": reduce, "colorMode": "value", "graphMode": "area"}
    if panel.kind == "bargauge":
        return {"reduceOptions": reduce, "orientation": "horizontal", "displayMode": "basic"}
    return {"showHeader": True, "cellHeight": "sm"}


def _datasource() -> Json:
    return {
        "name": "datasource",
        "label": "Data source",
        "type": "datasource",
        "query": "prometheus",
        "refresh": 1,
        "hide": 0,
        "current": {},
        "options": [],
    }


def _variable(variable: Variable) -> Json:
    query = f"label_values({variable.metric}, {variable.of})"
    if variable.newest:
        first_seen = f"min_over_time(timestamp({variable.metric})[$__range:1m])"
        query = f"query_result(sort_desc(max by ({variable.of}) ({first_seen})))"
    return {
        "name": variable.name,
        "label": variable.label,
        "type": "query",
        "datasource": DATASOURCE,
        "definition": query,
        "query": {"query": query, "refId": "StandardVariableQuery"},
        "refresh": 2,
        "sort": 0 if variable.newest else 1,
        **({"regex": f'/{variable.of}="([^"]+)"/'} if variable.newest else {}),
        "hide": 0,
        "multi": variable.multi,
        "includeAll": variable.multi,
        **({"allValue": ".*"} if variable.multi else {}),
        "current": {},
        "options": [],
    }
