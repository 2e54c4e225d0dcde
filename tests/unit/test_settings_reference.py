from pathlib import Path

from torchrun_controller.settings import OPTIONS
from torchrun_controller.settings_reference import page

PAGE = Path(__file__).parents[2] / "docs/settings.md"


def test_the_committed_page_is_the_generated_one() -> None:
    assert PAGE.read_text(encoding="utf-8") == page(), "run: make generate"


def test_every_setting_has_one_row() -> None:
    for option in OPTIONS:
        assert page().count(f"| `{option.flag}`, `{option.variable}` |") == 1
    assert page().count("| required |") == 1
