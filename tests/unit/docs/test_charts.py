"""Panels of the dashboards' pictures."""

import re

import charts
import pytest
from charts import Area, Panel, Series

AREA = Area(0, 0, 300, 180)


def panel(kind: str = "timeseries", *series: Series, **more) -> Panel:
    return Panel("Title", kind, "short", 240, series, **more)


def drawn(shown: Panel) -> str:
    return "\n".join(charts.draw(shown, AREA))


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0, "short", "0"),
        (0.333333, "short", "0.333"),
        (16, "short", "16"),
        (1234.5, "short", "1.23K"),
        (0.25, "percentunit", "25 %"),
        (0.0042, "s", "4.2 ms"),
        (0, "s", "0 s"),
        (90, "s", "1.5 min"),
        (64_000_000, "bytes", "64 MB"),
        (12.5, "ops", "12.5/s"),
    ],
)
def test_values_have_three_digits_and_a_unit(value, unit, text):
    assert charts.show(value, unit) == text


@pytest.mark.parametrize(
    ("highest", "axis"), [(0, (1, 0.5)), (16, (20, 10)), (30, (30, 10)), (0.07, (0.075, 0.025))]
)
def test_an_axis_ends_at_a_round_value(highest, axis):
    assert charts.top_of_axis(highest) == pytest.approx(axis)


def test_an_axis_of_time_has_whole_minutes():
    assert charts.top_of_axis(170, "s") == (180, 60)


def test_a_gap_in_the_values_is_a_gap_in_the_line():
    shown = drawn(panel("timeseries", Series("a", [1, 2, None, 2, 1])))
    assert shown.count('class="curve s0"') == 2


def test_areas_stand_on_each_other():
    series = (Series("a", [1, 2]), Series("b", [None, 3]))
    assert charts.stack(series) == [[1, 2], [1, 5]]
    shown = drawn(panel("timeseries", *series, stacked=True))
    assert len(re.findall('class="area', shown)) == 2


def test_names_without_room_are_counted():
    series = [Series(f"a long name {at}", [1.0]) for at in range(9)]
    shown = drawn(panel("timeseries", *series))
    named = len(re.findall(r">a long name \d<", shown))
    assert f">and {9 - named} more<" in shown


@pytest.mark.parametrize(("value", "kind"), [(1, "good"), (0, "bad"), (None, "bad")])
def test_a_number_out_of_its_bounds_is_red(value, kind):
    assert f'class="value {kind}"' in drawn(panel("stat", Series("", [value]), red_below=1))


def test_a_table_has_labels_and_values():
    rows = [Series("", [2.0], {"queue": "evals", "reason": "Unschedulable"})]
    shown = drawn(panel("table", *rows))
    assert re.findall(r">(\w+)</text>", shown) == [
        *("Title", "queue", "reason", "value", "evals", "Unschedulable", "2"),
    ]


def test_bars_are_in_proportion():
    shown = drawn(panel("bargauge", Series("a", [1.0]), Series("b", [4.0])))
    small, large = (float(width) for width in re.findall(r'width="([\d.]+)" height="10"', shown))
    assert small / large == pytest.approx(0.25)
