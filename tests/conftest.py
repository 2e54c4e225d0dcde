"""Options shared by all suites."""

import pytest


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--update-golden` writes the golden files anew."""
    parser.addoption("--update-golden", action="store_true", help="write golden files anew")
