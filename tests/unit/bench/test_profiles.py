"""The shares of a profile, by purpose and by function."""

from pathlib import Path

import pytest

from torchrun_bench import page, profiles

PURPOSES = (("log lines", r"structlog"), ("reconcile", r"reconcile/"))
COLLAPSED = """main (/x/app.py:10);plan (/x/reconcile/plan.py:1) 50
main (/x/app.py:11);plan (/x/reconcile/plan.py:7);info (/lib/structlog/base.py:3);emit (/lib/y.py:1) 20
main (/x/app.py:12);write (/x/pool.py:2) 30
_bootstrap (/lib/threading.py:9);get (/lib/queue.py:1);wait (/lib/threading.py:355) 900
"""


@pytest.fixture
def made() -> profiles.Profile:
    return profiles.profile(profiles.busy(COLLAPSED), PURPOSES, "a burst", "abc")


def test_an_idle_thread_is_left_out(made: profiles.Profile):
    assert made.samples == 100
    assert len(profiles.busy(COLLAPSED)) == 3


def test_the_innermost_purpose_counts(made: profiles.Profile):
    assert made.purposes == {"reconcile": 0.5, profiles.REST: 0.3, "log lines": 0.2}


def test_a_function_has_its_callees_in_the_cumulative_share(made: profiles.Profile):
    assert made.own["plan (reconcile/plan.py)"] == 0.5
    assert made.cumulative["plan (reconcile/plan.py)"] == 0.7
    assert made.own["emit (lib/y.py)"] == 0.2
    assert "main (x/app.py)" not in made.cumulative


def test_profiles_are_stored_beside_each_other(made: profiles.Profile, tmp_path: Path):
    path = tmp_path / "profiles.json"
    assert profiles.stored(path) == {}
    profiles.save("one", made, path)
    profiles.save("other", made, path)
    assert profiles.stored(path) == {"one": made, "other": made}


def test_the_table_has_the_largest_share_first(made: profiles.Profile):
    lines = profiles.tables({"burst": made}).splitlines()
    assert lines[0] == "| a burst (`flames/burst.svg`, commit abc) | share |"
    assert [line.split(" | ")[0] for line in lines[2:5]] == [
        "| reconcile",
        f"| {profiles.REST}",
        "| log lines",
    ]
    assert "| `plan (reconcile/plan.py)` | 50.0% | `plan (reconcile/plan.py)` | 70.0% |" in lines


def test_the_page_has_the_stored_profiles():
    assert page.flames_block(profiles.stored()) in page.PAGE.read_text()
