"""What the trial of a planted bug reads from the report of pytest."""

import pytest

from mutants import trial


@pytest.mark.parametrize(
    ("line", "test"),
    [
        ("FAILED tests/a.py::test_a", "tests/a.py::test_a"),
        ("FAILED tests/a.py::test_a - assert 1 == 2", "tests/a.py::test_a"),
        ("ERROR tests/a.py - ImportError: x [y]", "tests/a.py"),
        (
            "FAILED tests/a.py::A::test_a[two words-1] - TypeError: x[0] - y",
            "tests/a.py::A::test_a[two words-1]",
        ),
        (
            "FAILED tests/a.py::test_a[write PATCH jobs/x #1]",
            "tests/a.py::test_a[write PATCH jobs/x #1]",
        ),
        ("FAILED tests/a.py::test_a[a - b]", "tests/a.py::test_a[a - b]"),
    ],
)
def test_the_first_failed_test(line: str, test: str) -> None:
    found = trial._FAILED.search(f"..F\n{line}\n1 failed in 1.00s\n")
    assert found is not None
    assert found[1] == test
