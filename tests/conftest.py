"""Options of all test suites."""

import os
import signal
from pathlib import Path

import pytest

import profiles  # noqa: F401  registered before hypothesis reads its options


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--update-golden`, which rewrites the golden files, and `--long`, which adds slow tests."""
    parser.addoption("--update-golden", action="store_true", help="rewrite the golden files")
    parser.addoption("--long", action="store_true", help="run the long tests as well")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Skip the long tests unless --long is given."""
    for item in items:
        if item.get_closest_marker("long") and not config.getoption("--long"):
            item.add_marker(pytest.mark.skip(reason="long: run with --long"))


@pytest.hookimpl(tryfirst=True)  # before the plugin that writes JUnit files reads its option
def pytest_configure(config: pytest.Config) -> None:
    """Declare the marker `long`, restore SIGINT and SIGHUP, and write JUnit files for `make all`.

    nohup and background jobs of a shell ignore these signals, and children inherit that.
    """
    # Not for any pytest that a test starts. A target may run pytest several times.
    if file := os.environ.pop("TORCHRUN_TEST_JUNIT", ""):
        is_second = Path(f"{file}.xml").exists()
        config.option.xmlpath = f"{file}-{os.getpid()}.xml" if is_second else f"{file}.xml"
    config.addinivalue_line(
        "markers", "long: takes minutes, measures times or starts processes; runs with --long only"
    )
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
