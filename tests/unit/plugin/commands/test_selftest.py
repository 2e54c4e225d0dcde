"""`selftest`: the jobs that it creates and deletes, and the report that it leaves."""

import json
import signal
from pathlib import Path

import pytest
from aiohttp import web

from torchrun_api.contract.exit_codes import USAGE
from torchrun_api.json import JsonObject, object_at

from ..laptop import READY, Laptop

SECRETS = ("gpu-queue", "node-7", "10.1.2.3", "registry.corp", "selftest-")


def spec(laptop: Laptop, name: str) -> JsonObject:
    return object_at(laptop.server.objects["torchrunjobs", name], "spec")


def play(laptop: Laptop, **status: object) -> list[JsonObject]:
    """Give each job this status when it is created. Returns the specs of the jobs."""
    specs: list[JsonObject] = []

    def created(name: str) -> None:
        specs.append(spec(laptop, name))
        laptop.server.put("torchrunjobs", name, status={"conditions": READY, **status})

    def version(request: web.Request) -> web.Response | None:
        found = request.path == "/version"
        return web.json_response({"gitVersion": "v1.35.2"}) if found else None

    laptop.server.on_create = created
    laptop.server.hooks.append(version)
    laptop.server.put("torchrunqueues", "gpu-queue")
    return specs


def written(folder: Path) -> tuple[JsonObject, str]:
    """The report, and the text of both files."""
    (path,) = folder.glob("torchrun-selftest-*.json")
    page = path.with_suffix(".html").read_text()
    body: JsonObject = json.loads(path.read_text())
    return body, path.read_text() + page


@pytest.mark.long
def test_a_cluster_that_cannot_run_the_first_job_is_reported_without_its_names(
    laptop: Laptop, tmp_path: Path
) -> None:
    message = "Pod selftest-a-0-x on node-7 (10.1.2.3) has no torch in registry.corp/image:1"
    specs = play(laptop, phase="Failed", reason="TorchMissing", message=message)
    words = ["--queue", "gpu-queue", "--nodes", "3", "--gpus", "12"]
    result = laptop.run("selftest", *words, "--output-dir", str(tmp_path / "out"))
    assert result.exit_code == 1, result.output
    assert "✗ All-reduce" in result.stderr
    assert "The image of the queue has no torch" in result.stderr
    assert "– Killed rank" in result.stderr
    body, text = written(tmp_path / "out")
    checks = body["checks"]
    assert isinstance(checks, list)
    verdicts = [each["result"] for each in checks if isinstance(each, dict)]
    assert verdicts == ["failed", *["skipped"] * 6]
    assert body["passed"] is False
    assert object_at(body, "versions")["kubernetes"] == "v1.35.2"
    assert [secret for secret in SECRETS if secret in text] == []
    (only,) = specs  # the others would meet the same
    assert (only["numNodes"], only["nodeResources"]) == (3, {"gpus": 4})
    assert only["jobQueue"] == "gpu-queue"
    assert not [kind for kind, _ in laptop.server.objects if kind == "torchrunjobs"]


@pytest.mark.long
def test_ctrl_c_deletes_the_job_and_leaves_a_report(laptop: Laptop, tmp_path: Path) -> None:
    play(laptop, phase="Running", reason="WorkersRunning")
    seen: list[str] = []

    def interrupt(request: web.Request) -> None:
        if request.path.endswith("/pods") and request.query.get("watch") and not seen:
            seen.append(request.path)
            signal.raise_signal(signal.SIGINT)

    laptop.server.hooks.append(interrupt)
    result = laptop.run("selftest", "--queue", "gpu-queue", "--output-dir", str(tmp_path))
    assert result.exit_code == 130, result.output
    body, _ = written(tmp_path)
    checks = body["checks"]
    assert isinstance(checks, list)
    assert {each["reason"] for each in checks if isinstance(each, dict)} == {"stopped by Ctrl-C"}
    assert not [kind for kind, _ in laptop.server.objects if kind == "torchrunjobs"]


def test_a_folder_that_cannot_be_written_is_refused_before_any_job(laptop: Laptop) -> None:
    Path("file").touch()
    result = laptop.run("selftest", "--output-dir", "file/below")
    assert result.exit_code == 2
    assert "Cannot write to --output-dir file/below: Not a directory." in result.stderr
    assert not laptop.server.requests


def test_gpus_must_be_spread_evenly(laptop: Laptop) -> None:
    result = laptop.run("selftest", "--gpus", "3", "--nodes", "2")
    assert (result.exit_code, laptop.server.requests) == (USAGE, []), result.output
    assert "--gpus 3 cannot be spread evenly over 2 nodes." in result.stderr
