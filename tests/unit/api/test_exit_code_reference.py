from pathlib import Path

from torchrun_api.contract import exit_codes
from torchrun_api.generate.exit_code_reference import page

PAGE = Path(__file__).parents[3] / "docs/exit-codes.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make generate"


def test_every_table_of_exit_codes_is_on_the_page() -> None:
    tables = [value for value in vars(exit_codes).values() if isinstance(value, tuple)]
    statuses = [s for table in tables for s in table if isinstance(s, exit_codes.ExitStatus)]
    assert len(statuses) > 30
    assert all(f"| {status.meaning} |" in page() for status in statuses)
