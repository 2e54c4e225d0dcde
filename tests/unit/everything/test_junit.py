"""The JUnit files that a pytest of the tests writes."""

import os
import subprocess
import sys
from pathlib import Path

from everything import junit
from everything.targets import ROOT

ANY = "tests/unit/test_clock.py"  # a file beside it shares the conftest.py of tests
TEST = """
import os, pytest

def test_a_pytest_in_a_test_writes_none():
    assert "TORCHRUN_TEST_JUNIT" not in os.environ

@pytest.mark.parametrize("x", ["a b"])
def test_skip(x):
    pytest.skip("no GPU")

@pytest.mark.xfail(strict=True)
def test_known():
    assert False

def test_fails():
    assert False

@pytest.fixture
def broken():
    raise OSError

def test_error(broken):
    pass
"""


def test_the_cases_of_two_runs(tmp_path: Path) -> None:
    file = tmp_path / "test_sample.py"
    file.write_text(TEST)
    folder = tmp_path / "junit"
    folder.mkdir()
    for processes in ("0", "1"):
        ended = subprocess.run(
            (sys.executable, "-m", "pytest", "-c", "pyproject.toml", "-n", processes, ANY, file),
            cwd=ROOT,
            env={**os.environ, "TORCHRUN_TEST_JUNIT": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )
        assert ended.returncode == 1, ended.stdout
    cases = junit.read(folder)
    # The id of a file outside the checkout is only the name.
    ours = {case.test: case for case in cases if "test_clock" not in case.test}
    assert len(cases) > 2 * len(ours)
    assert {name for name, case in ours.items() if case.failed} == {"test_fails", "test_error"}
    assert {name: case.reason for name, case in ours.items() if case.skipped} == {
        "test_skip[a b]": "no GPU"
    }
    assert ours.keys() >= {"test_a_pytest_in_a_test_writes_none", "test_known"}


def test_a_file_that_is_cut_off_is_a_failure(tmp_path: Path) -> None:
    (tmp_path / "1.xml").write_text("<testsuites><testcase")
    (case,) = junit.read(tmp_path)
    assert case.failed
    assert case.test.startswith("1.xml is no complete JUnit file")
