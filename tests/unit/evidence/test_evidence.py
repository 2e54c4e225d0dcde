"""A failed test stores its evidence. kubectl is a script that shows one broken job."""

import json
from pathlib import Path
from typing import cast

import httpx
import pytest

from e2e.cluster import Cluster
from e2e.evidence import QUIET, gather
from e2e.space import Space
from evidence import LINES, attach
from integration import evidence as integration
from integration.audit import AuditLog
from integration.controller_process import Api
from integration.team import Team

OBJECTS = {
    "torchrunjobs": {
        "metadata": {"name": "train", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "status": {
            "phase": "Queued",
            "reason": "Unschedulable",
            "message": "0 of 2 pods are scheduled.",
            "conditions": [{"type": "Scheduled", "status": "False", "reason": "NoRoom"}],
        },
    },
    "pods": {
        "metadata": {"name": "train-sync-0", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "spec": {"nodeName": "node-1"},
        "status": {
            "phase": "Running",
            "containerStatuses": [
                {
                    "name": "sync",
                    "ready": False,
                    "restartCount": 1,
                    "state": {"running": {}},
                    "lastState": {"terminated": {"exitCode": 3}},
                }
            ],
        },
    },
    "events": {
        "metadata": {"name": "e", "creationTimestamp": "2026-01-01T00:00:00Z"},
        "involvedObject": {"kind": "Pod", "name": "train-sync-0"},
        "type": "Warning",
        "reason": "BackOff",
        "message": "restarting",
    },
}
KUBECTL = """#!/bin/sh
echo "$@" >> {calls}
[ "$1" = -n ] && shift 2
case "$1 $2" in
{cases}
"logs train-sync-0") seq 500 ;;
"logs -n") echo line of the controller ;;
*) echo "no answer" >&2; exit 1 ;;
esac
"""


@pytest.fixture
def space(tmp_path: Path) -> Space:
    cases = ""
    for kind, one in OBJECTS.items():
        (tmp_path / kind).write_text(json.dumps({"items": [one]}))
        cases += f'"get {kind}") cat {tmp_path / kind} ;;\n'
    script = tmp_path / "kubectl"
    script.write_text(KUBECTL.format(calls=tmp_path / "calls", cases=cases))
    script.chmod(0o755)
    return Space(Cluster(tmp_path / "config", tmp_path, "c", "t"), httpx.Client(), "ns")


def report() -> pytest.TestReport:
    return pytest.TestReport(
        "tests/e2e/test_x.py::test_y[a/b]", ("x", 1, "x"), {}, "failed", "it broke", "call"
    )


def test_the_report_shows_the_end_of_each_text_and_the_folder_has_all(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    failed = report()
    attach(failed, tmp_path / "failures", gather(space), QUIET)
    shown = dict(failed.sections)
    assert "train: Queued (Unschedulable: 0 of 2 pods are scheduled.)" in shown["torchrunjobs"]
    assert "Scheduled False NoRoom" in shown["torchrunjobs"]
    assert 'sync: ready False, restarts 1, {"running": {}}, before' in shown["pods"]
    assert '"exitCode": 3' in shown["pods"]
    assert "Warning Pod/train-sync-0 BackOff: restarting" in shown["events"]
    assert "line of the controller" in shown["log of the controller"]
    for title in ("log of train-sync-0 sync", "log of train-sync-0 sync before its restart"):
        assert shown[title].splitlines()[-1] == "500"
        assert len(shown[title].splitlines()) == LINES + 1
    assert not any(title.startswith(QUIET) for title in shown)

    folder = tmp_path / "failures" / "test_x-test_y-a-b"
    assert str(folder) in shown["evidence"]
    assert shown["evidence"].endswith("it broke")
    assert len((folder / "log-of-train-sync-0-sync.txt").read_text().splitlines()) == 500
    assert json.loads((folder / "all-pods.txt").read_text()) == [OBJECTS["pods"]]
    assert "no answer" in (folder / "all-leases.txt").read_text()
    assert "it broke" in (folder / "test.txt").read_text()
    invocations = (tmp_path / "calls").read_text()
    assert "logs train-sync-0 -c sync --timestamps --tail=2000 --previous" in invocations


def test_an_unreachable_cluster_does_not_change_the_failure(
    space: Space, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    (tmp_path / "kubectl").unlink()
    failed = report()
    attach(failed, tmp_path / "failures", gather(space), QUIET)
    assert "kubectl" in dict(failed.sections)["torchrunjobs"]
    assert failed.longreprtext == "it broke"


def test_a_failed_teardown_does_not_replace_the_evidence_of_the_test(tmp_path: Path) -> None:
    call, teardown = report(), report()
    call.sections.append(("Captured stdout call", "the log of a controller"))
    teardown.when = "teardown"
    attach(call, tmp_path, iter([("pods", "while the test ran")]))
    attach(teardown, tmp_path, iter([("pods", "afterwards")]))
    folder = tmp_path / "test_x-test_y-a-b"
    assert (folder / "pods.txt").read_text() == "while the test ran"
    assert "the log of a controller" in (folder / "test.txt").read_text()
    after = tmp_path / "test_x-test_y-a-b-teardown"
    assert (after / "pods.txt").read_text() == "afterwards"


def test_partial_evidence_is_stored(tmp_path: Path) -> None:
    def texts():
        yield "first", "what there is"
        raise OSError("the disk is full")

    failed = report()
    attach(failed, tmp_path, texts())
    assert ("first", "what there is") in failed.sections
    assert any("the disk is full" in text for _, text in failed.sections)


class Answers:
    """The API server of a team. It refuses to list events."""

    def items(self, path: str) -> list[dict[str, object]]:
        if path.endswith("events"):
            raise httpx.ConnectError("refused")
        return [OBJECTS["torchrunjobs"]] if path.endswith("torchrunjobs") else []


def test_an_integration_test_stores_logs_and_statuses(tmp_path: Path) -> None:
    (tmp_path / "0").mkdir()
    (tmp_path / "0" / "controller.log").write_text("one\nlast line\n")
    audit = AuditLog(tmp_path)
    audit.path.write_text('{"verb": "patch"}\n')
    team = Team.__new__(Team)
    team.api = cast(Api, Answers())
    team.core, team.batch, team.group = "/api/v1", "/apis/batch/v1", "/apis/torchrun.ai/v1alpha1"
    gathered = dict(integration.gather({"team": team, "audit": audit, "tmp_path": tmp_path}))
    assert gathered["log 0/controller.log"].endswith("last line")
    assert gathered["audit log"] == '{"verb": "patch"}'
    assert "refused" in gathered["all events"]
    assert "train: " in gathered["queues and jobs"]
    assert "Unschedulable" in gathered["queues and jobs"]


CONFTEST = """
import pytest
from e2e.conftest import pytest_runtest_makereport
import e2e.conftest
from e2e.space import Space

@pytest.fixture
def space(monkeypatch, tmp_path):
    monkeypatch.setattr(e2e.conftest, "FAILURES", __import__("pathlib").Path({folder!r}))
    monkeypatch.setattr(e2e.conftest, "gather", lambda space: iter([("pods", f"those of {{space}}")]))
    return "the namespace"
"""
TESTS = """
def test_passes(space): pass
def test_fails(space): assert 1 == 2
def test_has_no_namespace(): assert 1 == 2
"""
pytest_plugins = ["pytester"]


def test_the_hook_stores_evidence_of_failed_tests(
    pytester: pytest.Pytester, tmp_path: Path
) -> None:
    pytester.makeconftest(CONFTEST.format(folder=str(tmp_path)))
    pytester.makepyfile(TESTS)
    ran = pytester.runpytest_inprocess(
        "-p", "no:cacheprovider", "-p", "no:xdist", "-p", "no:asyncio"
    )
    ran.assert_outcomes(passed=1, failed=2)
    ran.stdout.fnmatch_lines(["*pods*", "those of the namespace"])
    assert len(list(tmp_path.glob("*"))) == 1
    (directory,) = tmp_path.glob("*test_fails")
    assert "assert 1 == 2" in (directory / "test.txt").read_text()
