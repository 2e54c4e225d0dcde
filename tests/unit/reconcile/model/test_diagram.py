"""The page on phases is drawn from the transition table: `pytest --update-golden` writes it anew."""

from pathlib import Path

from torchrun_controller.reconcile.model.phases import PHASES, ROWS, TERMINAL, State

PAGE = Path(__file__).parents[4] / "docs" / "phases.md"


def page() -> str:
    live = [p for p in PHASES if p not in TERMINAL]
    targets = {p: [f for f in State if ROWS[f].phase == p] for p in PHASES}
    lines = [
        "# Phases",
        "",
        "Generated from the transition table in `reconcile/model/phases.py`.",
        "",
        "A phase sums up what is found; it depends on what is there now and not on the way there. So",
        "every phase that is not terminal leads to every phase below whose finding holds. Terminal",
        "phases absorb.",
        "",
        "```mermaid",
        "stateDiagram-v2",
        "  state alive {",
        *(f"    {phase}" for phase in live),
        "  }",
        "  [*] --> alive",
        *(f"  alive --> {phase}" for phase in PHASES if phase in TERMINAL),
        *(f"  {phase} --> [*]" for phase in PHASES if phase in TERMINAL),
        "```",
        "",
        "| finding, the first that holds | phase | condition |",
        "|---|---|---|",
    ]
    for phase, findings in targets.items():
        for state in findings:
            row = ROWS[state]
            lines.append(f"| {state.value} | {phase} | {row.condition}={row.status} |")
    for state in State:
        row = ROWS[state]
        if row.phase is None:
            lines.append(f"| {state.value} | unchanged | {row.condition}={row.status} |")
    return "\n".join(lines) + "\n"


def test_the_page_says_what_the_table_does(request):
    if request.config.getoption("--update-golden"):
        PAGE.write_text(page())
    assert PAGE.read_text() == page()
