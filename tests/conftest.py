"""Options and surroundings shared by all suites."""

import signal

import pytest

import profiles  # noqa: F401  registered before hypothesis reads its options


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` writes the golden files anew."""
    parser.addoption("--update-golden", action="store_true", help="write golden files anew")


def pytest_configure() -> None:
    """Undo what nohup or a shell's background hands down: ignored signals reach every child."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGHUP, signal.SIGQUIT, signal.SIGTERM):
        signal.signal(number, signal.SIG_DFL)
