"""Writes docs/phases.md from the tables of phases and steps: `make generate`."""

from pathlib import Path

from torchrun_api.kinds.status import PHASES, Phase
from torchrun_controller.reconcile.job.steps import STEPS
from torchrun_controller.reconcile.model.phases import ROWS, TRANSITIONS, State

PAGE = Path(__file__).with_name("phases.md")

# From this heading on, the page is written by hand.
BY_HAND = "\n## Conditions\n"


def page() -> str:
    """The page: which phase follows which, the steps in their order, and what each state means."""
    lines = [
        "# Phases and conditions",
        "",
        "Look up what a phase or a condition means, which phase can follow which, and which",
        "objects belong to a job. `status.phase` is a one-word summary of the conditions.",
        "",
        "A job starts in Pending, or in the first phase that applies. If the controller is killed",
        "after it created a gang and before it wrote the status, it continues as if the phase were",
        "Queued. A job that is Pending because the Service of its new gang is refused continues in",
        "the same way.",
        "",
        "| phase | next |",
        "|---|---|",
        *(f"| {phase} | {following(phase)} |" for phase in PHASES),
        "",
        "## How the controller decides",
        "",
        "The first step that applies decides. The order is the same for every attempt.",
        "",
        "| step | phases | what it does |",
        "|---|---|---|",
    ]
    for step in STEPS:
        name = step.decide.__name__.replace("_", " ")
        text = (step.decide.__doc__ or "").partition("\n")[0]
        phases = ", ".join(step.leads_to) or "unchanged"
        lines.append(f"| {name} | {phases} | {text} |")
    lines += [
        "",
        "During a resize the phase stays the same until the new gang is created.",
        "",
        "## What each phase means",
        "",
        "The last columns say whether the job keeps its admission by the queue and the pods of its",
        "gang, and whether the deadline counts the time. A gang that exists keeps its admission",
        "unless it waits for somebody's action: then it ends after 30 minutes, the job returns the",
        "admission, and asks for it again after 30 minutes (doubled each time, at most 8 hours).",
        "",
        "| phase | condition | state of the job | admission | pods | runs |",
        "|---|---|---|---|---|---|",
    ]
    for phase in (*PHASES, None):
        for state in State:
            row = ROWS[state]
            if row.phase == phase:
                phase_name = phase or "unchanged"
                runs = "yes" if row.runs else ""
                lines.append(
                    f"| {phase_name} | {row.condition}={row.status} | {state.value}"
                    f" | {row.admission.value} | {row.pods.value} | {runs} |"
                )
    by_hand = PAGE.read_text(encoding="utf-8").partition(BY_HAND)[2]
    return "\n".join(lines) + "\n" + BY_HAND + by_hand


def following(phase: Phase) -> str:
    """The phases that may follow."""
    return ", ".join(each for each in PHASES if each in TRANSITIONS[phase]) or "none: it is final"


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
