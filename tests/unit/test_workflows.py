"""The workflows run the project's own targets, with pinned actions and few permissions."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from pages import ROOT

FOLDER = ROOT / ".github" / "workflows"
WORKFLOWS = {
    path.stem: yaml.load(path.read_text(encoding="utf-8"), yaml.BaseLoader)
    for path in FOLDER.glob("*.yaml")
}
MAKEFILE = (ROOT / "Makefile").read_text(encoding="utf-8")
TARGETS = set(re.findall(r"(?m)^([a-z0-9-]+):", MAKEFILE))


def steps(workflow: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for job in workflow["jobs"].values() for step in job.get("steps", ())]


def test_pull_requests_run_what_ci_runs() -> None:
    assert (ROOT / ".ci" / "run").read_text().endswith("exec make test\n")
    (rules,) = re.findall(r"(?ms)^test:.*?(?=^all:)", MAKEFILE)
    prerequisites = r"^(?:test|on-clusters): (.+?)(?: ##|$)"
    nested = r"\$\(MAKE\) --no-print-directory ([a-z0-9]+)"
    tested = ["".join(either) for either in re.findall(f"(?m){prerequisites}|{nested}", rules)]
    checks = WORKFLOWS["checks"]
    assert {"pull_request", "push", "workflow_call"} == set(checks["on"])
    matrix = checks["jobs"]["checks"]["strategy"]["matrix"]["targets"]
    assert " ".join(matrix) == " ".join(tested)


@pytest.mark.parametrize("name", WORKFLOWS)
def test_its_targets_exist(name: str) -> None:
    script = "\n".join(step.get("run", "") for step in steps(WORKFLOWS[name]))
    named = set(re.findall(r"\bmake ([a-z][a-z0-9-]*)", script))
    assert named <= TARGETS
    assert named or "make $TARGETS" in script


@pytest.mark.parametrize("name", WORKFLOWS)
def test_actions_are_pinned_by_commit_and_name_its_version(name: str) -> None:
    text = (FOLDER / f"{name}.yaml").read_text(encoding="utf-8")
    uses = [use for use in re.findall(r"uses: (.*)", text) if not use.startswith("./")]
    assert uses
    pin = r"[\w/-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+"
    assert [use for use in uses if not re.fullmatch(pin, use)] == []


@pytest.mark.parametrize("name", WORKFLOWS)
def test_it_may_read_and_nothing_else_by_default(name: str) -> None:
    assert WORKFLOWS[name]["permissions"] == {"contents": "read"}
    writing = {
        job
        for job, body in WORKFLOWS[name]["jobs"].items()
        if "write" in body.get("permissions", {}).values()
    }
    assert writing == {"release": {"release"}, "pages": {"publish"}}.get(name, set())


@pytest.mark.parametrize("path", [*(ROOT / ".github" / "ISSUE_TEMPLATE").glob("*.yaml")])
def test_issue_forms_have_what_the_forge_requires(path: Path) -> None:
    form = yaml.safe_load(path.read_text(encoding="utf-8"))
    assert form["name"]
    assert form["description"]
    for part in form["body"]:
        assert part["type"] in {"markdown", "textarea", "input"}
        assert "label" in part["attributes"] or part["type"] == "markdown"
