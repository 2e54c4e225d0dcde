"""The example of CONTRIBUTING.md runs unchanged."""

from typing import Any

from pages import ROOT, blocks

PAGE = ROOT / "CONTRIBUTING.md"


def test_the_example_runs():
    (example,) = [block for block in blocks(PAGE) if block.language == "python"]
    module: dict[str, Any] = {}
    exec(compile(example.text, str(PAGE), "exec"), module)
    tests = [value for name, value in module.items() if name.startswith("test_")]
    assert len(tests) == 1
    tests[0]()
