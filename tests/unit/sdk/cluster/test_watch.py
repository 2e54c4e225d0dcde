"""Watches that fail, and that end while they start."""

from pathlib import Path

import pytest

from torchrun_sdk.cluster import watch
from torchrun_sdk.cluster.kubectl import Child, Kubectl
from torchrun_sdk.cluster.watch import Failures, Trouble, Watch

from ..call.test_gang import until
from ..pods import SECONDS
from .test_kubectl import program

pytestmark = pytest.mark.long  # processes

FAILS = "import sys; sys.exit({!r})"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (FAILS.format("Error from server (Forbidden): no"), [True]),
        (FAILS.format("error: You must be logged in to the server (Unauthorized)"), [True]),
        (FAILS.format("Unable to connect to the server"), [False]),
        ("print('ADDED'); " + FAILS.format("Error from server (Forbidden): no"), []),
        ("pass", []),
    ],
)
def test_failures_in_a_row_are_reported(
    monkeypatch: pytest.MonkeyPatch, text: str, expected: list[bool]
) -> None:
    monkeypatch.setattr(watch, "_REFUSALS", 3)
    monkeypatch.setattr(watch, "_FAILURES", 3)
    reported: list[Trouble] = []
    failures = Failures("it", reported.append)
    for _ in range(3):
        assert reported == []
        child = Child(program(text), lambda line: None)
        child.wait(SECONDS)
        failures.ended(child)
        child.close()
    assert [trouble.is_refused for trouble in reported] == expected
    assert all(trouble.text.startswith("it failed 3 times in a row: ") for trouble in reported)


def test_a_watch_that_is_closed_while_it_starts_leaves_no_program(
    tmp_path: Path, cluster: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_PAUSE", 0.01)
    mark = tmp_path / "second"
    script = f"#!/bin/sh\ntest -e {mark} && exec sleep 1000\ntouch {mark}\n"
    started: list[Child] = []
    watches: list[Watch] = []

    class ClosedWhileItStarts(Child):
        def __init__(self, *arguments: object, **options: object) -> None:
            super().__init__(*arguments, **options)  # type: ignore[arg-type]
            started.append(self)
            if len(started) == 2:
                until(lambda: watches)
                watches[0].close()

    watched = Kubectl()
    watched.command()  # selects the namespace with the kubectl of the test
    (tmp_path / "bin" / "kubectl").write_text(script)
    monkeypatch.setattr(watch, "Child", ClosedWhileItStarts)
    watches.append(Watch(watched, ["pods"], lambda kind, body: None))
    until(lambda: len(started) == 2 and started[1]._process.poll() is not None)
