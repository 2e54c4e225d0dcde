"""A soak test detects each violation."""

from typing import Any

import httpx
import pytest

from soak.verdict import Verdict
from torchrun_api import names


@pytest.fixture
def verdict() -> Verdict:
    return Verdict(httpx.Client(), "team")


def child(uid: str, attempt: int = 0) -> dict[str, Any]:
    labels = {names.ATTEMPT_LABEL: str(attempt)}
    return {
        "metadata": {"name": "a", "uid": uid, "labels": labels, "ownerReferences": [{"uid": "o"}]}
    }


def job(phase: str, attempt: int = 0, name: str = "a", admitted: str = "False") -> dict[str, Any]:
    condition = {"type": "Admitted", "status": admitted}
    return {
        "metadata": {"name": name, "uid": name},
        "spec": {"jobQueue": "narrow"},
        "status": {"phase": phase, "attempt": attempt, "conditions": [condition]},
    }


def pod(uid: str, attempt: int) -> dict[str, Any]:
    labels = {names.JOB_LABEL: "a", names.ATTEMPT_LABEL: str(attempt)}
    meta = {"name": uid, "uid": uid, "labels": labels, "annotations": {names.START: "0"}}
    return {"metadata": meta, "status": {"phase": "Running"}}


def test_a_second_job_for_an_attempt(verdict: Verdict) -> None:
    verdict._child(child("1"), False)
    verdict._child(child("2", attempt=1), False)
    verdict._child(child("1"), True)
    assert verdict.wrong == []
    verdict._child(child("3"), False)
    assert verdict.wrong == ["team: attempt 0 of a has 2 Jobs"]


def test_a_terminal_phase_that_changes(verdict: Verdict) -> None:
    verdict._job(job("Succeeded"), False)
    verdict._job(job("Queued"), False)
    assert verdict.wrong == ["team: a leaves Succeeded for Queued"]


def test_an_attempt_number_that_decreases(verdict: Verdict) -> None:
    verdict._job(job("Running", 2), False)
    verdict._job(job("Running", 1), False)
    assert verdict.wrong == ["team: a goes back from attempt 2 to 1"]


def test_two_running_gangs(verdict: Verdict) -> None:
    verdict._pod(pod("1", 0), False)
    verdict._pod(pod("2", 0), False)
    verdict._one_gang_at_a_time()
    verdict._pod(pod("1", 0), True)
    verdict._pod(pod("3", 1), False)
    assert verdict.wrong == []
    verdict._one_gang_at_a_time()
    assert "two gangs" in verdict.wrong[0]


def test_an_exceeded_quota(verdict: Verdict) -> None:
    for number in range(5):
        verdict._quota()
        verdict._job(job("Running", name=f"job-{number}", admitted="True"), False)
    assert verdict.wrong == []
    verdict._quota()
    assert "more are admitted" in verdict.wrong[0]
