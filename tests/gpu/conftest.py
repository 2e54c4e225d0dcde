"""`--table` prints what was seen."""

import pytest

from gpu.machine import missing, table


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--table`."""
    parser.addoption("--table", action="store_true", help="print the results as Markdown")


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Print the table. A test that failed has a row as well."""
    if not terminalreporter.config.getoption("--table") or missing():
        return
    results = [
        (str(case), str(seen) if report.passed else f"FAILED {seen}".strip())
        for reports in (terminalreporter.getreports(name) for name in ("passed", "failed"))
        for report in reports
        for case, seen in report.user_properties or [(report.nodeid, "")]
    ]
    terminalreporter.write_line(table(results))
