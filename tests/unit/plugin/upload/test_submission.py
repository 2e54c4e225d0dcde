"""The commands end to end, with the proxy of kubectl and an API server in memory."""

import json
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from aiohttp import web
from click.testing import CliRunner

from kubectl_torchrun.__main__ import cli
from torchrun_api.json import JsonObject, object_at

from ..api_server import refusal
from ..laptop import READY, Laptop, interrupt_at, play_controller, waiting_job


@pytest.mark.long
def test_from_a_directory_to_the_result(laptop: Laptop) -> None:
    play_controller(laptop.server)
    result = laptop.run("submit", "--name", "run", "python train.py")
    assert result.exit_code == 0, result.output
    assert sorted(result.stdout.splitlines()) == [
        f"[{rank}] step {step}" for rank in (0, 1) for step in range(3)
    ]
    assert "Created torchrunjob.torchrun.ai/run\n" in result.stderr
    assert "Uploaded 1 file," in result.stderr
    assert "WaitingForUpload" not in result.stderr
    assert "Succeeded\n" in result.stderr


@pytest.mark.long
def test_a_failed_run_is_exit_code_1(laptop: Laptop) -> None:
    play_controller(laptop.server, "Failed")
    assert laptop.run("submit", "--name", "run", "python train.py").exit_code == 1


def play_repeated_failure(laptop: Laptop) -> None:
    """Fail three attempts of the job with the same exception, and the job after that."""
    play_controller(laptop.server)
    attempts = [
        {
            "number": number,
            "reason": "Exception",
            "message": f"Pod run-r{number}-0-abcde: ValueError: bad batch (rank 0, exit code 1).",
        }
        for number in range(3)
    ]

    def uploaded() -> None:
        status = {"phase": "Queued", "reason": "BackingOff", "conditions": READY}
        laptop.server.put("torchrunjobs", "run", status={**status, "attempts": attempts})
        laptop.worker("run", 0, 2, "2026-01-01T00:00:00.000000000Z step 1\n", terminated={})

    def read(request: web.Request) -> None:
        if request.path.endswith("/log"):
            laptop.server.put("torchrunjobs", "run", status={"phase": "Failed"})

    laptop.server.on_upload = uploaded
    laptop.server.hooks.append(read)


def patches(laptop: Laptop) -> list[str]:
    return [request for request in laptop.server.requests if request.startswith("PATCH")]


@pytest.mark.long
def test_a_job_that_repeats_a_failure_is_suspended(laptop: Laptop) -> None:
    play_repeated_failure(laptop)
    laptop.server.hooks.pop()
    result = laptop.run("run", "--name", "run", "--stop-on-repeated-failure", "python train.py")
    assert result.exit_code == 6
    assert len(patches(laptop)) == 1
    assert laptop.server.objects["torchrunjobs", "run"]["spec"] == {"suspend": True}
    assert (
        "Suspended job run. The last 3 attempts failed within a minute with the same exception,"
        " before the first step: ValueError: bad batch\nThis is an error in the code. Restarts do"
        " not help.\nFix the code, then submit it again." in result.stderr
    )
    assert "kubectl torchrun resume run -n ns" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize("flags", [(), ("--keep-retrying",)], ids=["no terminal", "flag"])
def test_a_job_may_repeat_a_failure(laptop: Laptop, flags: tuple[str, ...]) -> None:
    play_repeated_failure(laptop)
    result = laptop.run("submit", "--name", "run", *flags, "python train.py")
    assert (result.exit_code, patches(laptop)) == (1, [])


@pytest.mark.long
def test_with_output_json_stdout_is_the_job(laptop: Laptop) -> None:
    play_controller(laptop.server)
    result = laptop.run("submit", "--name", "run", "-o", "json", "python train.py")
    assert result.exit_code == 0
    assert json.loads(result.stdout)["spec"]["command"] == "python train.py"
    assert "kubectl torchrun logs run --follow -n ns" in result.stderr


@pytest.mark.long
def test_a_dry_run_creates_nothing(laptop: Laptop) -> None:
    result = laptop.run("submit", "--dry-run", "-o", "name", "--name", "run", "x")
    assert (result.exit_code, result.stdout) == (0, "torchrunjob.torchrun.ai/run\n")
    assert ("torchrunjobs", "run") not in laptop.server.objects


@pytest.mark.long
def test_a_lost_response_creates_no_second_job(laptop: Laptop) -> None:
    play_controller(laptop.server)
    lost: list[str] = []

    def lose(request: web.Request) -> None:
        if request.method == "POST" and not lost:
            created = laptop.server.on_create

            def cut(name: str) -> None:
                lost.append(name)
                laptop.server.on_create = created
                created(name)
                assert request.transport is not None
                request.transport.abort()

            laptop.server.on_create = cut

    laptop.server.hooks.append(lose)
    result = laptop.run("submit", "--name", "run", "python train.py")
    assert lost == ["run"]
    assert result.exit_code == 0, result.output
    assert sum(request.startswith("POST") for request in laptop.server.requests) == 2


@pytest.mark.long
@pytest.mark.parametrize(("status", "code"), [(500, 0), (504, 0), (429, 2)])
def test_a_job_that_is_stored_in_spite_of_an_error_is_no_conflict(
    laptop: Laptop, status: int, code: int
) -> None:
    """A webhook adds an annotation. After 429 nothing is stored, so the job is that of another."""
    play_controller(laptop.server)
    created = laptop.server.on_create

    def store_and_fail(name: str) -> None:
        laptop.server.on_create = created
        job = laptop.server.objects["torchrunjobs", name]
        annotations = object_at(object_at(job, "metadata"), "annotations")
        more = {"annotations": {**annotations, "webhook": "x"}}
        laptop.server.put("torchrunjobs", name, metadata=more)
        created(name)
        raise Failure(status)

    laptop.server.on_create = store_and_fail
    result = laptop.run("submit", "--name", "run", "python train.py")
    assert result.exit_code == code, result.output
    assert ("already exists" in result.stderr) == (code == 2)


class Failure(web.HTTPException):
    """An error of the API server."""

    def __init__(self, status: int) -> None:
        self.status_code = status
        body = {"kind": "Status", "code": status, "message": "request did not complete"}
        super().__init__(text=json.dumps(body), content_type="application/json")


@pytest.mark.long
def test_the_job_of_another_command_is_a_conflict(laptop: Laptop) -> None:
    play_controller(laptop.server)
    assert laptop.run("submit", "--name", "run", "python train.py").exit_code == 0
    failed: list[str] = []

    def fail(request: web.Request) -> web.Response | None:
        if request.method != "POST" or failed:
            return None
        failed.append(request.path)
        return refusal(504, "request did not complete")

    laptop.server.hooks.append(fail)
    result = laptop.run("submit", "--name", "run", "python other.py")
    assert result.exit_code == 2
    assert "already exists" in result.stderr


GONE: JsonObject = {"kind": "Status", "code": 410, "message": "too old resource version"}


@pytest.mark.long
@pytest.mark.parametrize("event", [None, {"type": "ERROR", "object": GONE}], ids=["end", "expire"])
def test_ended_and_expired_watches_are_resumed(laptop: Laptop, event: JsonObject | None) -> None:
    play_controller(laptop.server)
    finish = laptop.server.on_upload

    def disturb() -> None:
        laptop.server.disturb_watches(event)
        finish()

    laptop.server.on_upload = disturb
    result = laptop.run("submit", "--name", "run", "python train.py")
    assert result.exit_code == 0, result.output


Answer = Callable[[web.Request], web.Response | None]


def always(code: int, message: str, **details: object) -> Answer:
    return lambda _: refusal(code, message, **details)


@pytest.mark.long
@pytest.mark.parametrize(
    ("answer", "code", "message"),
    [
        (always(404, "the server could not find the requested resource"), 4, "is not installed"),
        (always(401, "Unauthorized"), 4, "not logged in"),
        (
            always(403, 'torchrunjobs is forbidden: User "x" cannot list resource "torchrunjobs"'),
            4,
            "role edit in namespace ns",
        ),
        (always(422, "", causes=[{"field": "spec.x", "message": "bad"}]), 2, "  spec.x: bad"),
        (
            always(404, 'namespaces "ns" not found', name="ns", kind="namespaces"),
            2,
            "does not exist",
        ),
        (always(405, "not allowed"), 4, "HTTP 405: not allowed"),
    ],
)
def test_refusals_say_what_to_do(laptop: Laptop, answer: Answer, code: int, message: str) -> None:
    laptop.server.hooks.append(answer)
    result = laptop.run("submit", "python train.py")
    assert result.exit_code == code
    assert message in result.stderr
    assert "Traceback" not in result.output


@pytest.mark.long
@pytest.mark.parametrize(
    "message",
    [
        'torchrunjobs "x" is forbidden: exceeded quota: jobs, requested: count=1, limited: count=5',
        "admission webhook denied the request: no jobs at night",
    ],
)
def test_a_refusal_of_admission_is_no_missing_role(laptop: Laptop, message: str) -> None:
    laptop.server.hooks.append(always(403, message))
    result = laptop.run("submit", "python train.py")
    assert result.exit_code == 4
    assert result.stderr.endswith(f"Error: The API server refused the request: {message}\n")


@pytest.mark.long
def test_submit_with_a_queue_works_without_permission_to_list_queues(laptop: Laptop) -> None:
    play_controller(laptop.server)

    def hide(request: web.Request) -> web.Response | None:
        hidden = request.path.endswith("torchrunqueues")
        return refusal(403, "cannot list") if hidden else None

    laptop.server.hooks.append(hide)
    assert laptop.run("submit", "--queue", "q", "--name", "run", "x").exit_code == 0
    assert laptop.run("submit", "x").exit_code == 4


@pytest.mark.long
def test_a_forbidden_upload_leaves_the_job_waiting(laptop: Laptop) -> None:
    play_controller(laptop.server)

    def forbid(request: web.Request) -> web.Response | None:
        return refusal(403, "cannot update pods/proxy") if "/proxy/" in request.path else None

    laptop.server.hooks.append(forbid)
    result = laptop.run("submit", "--name", "run", "x")
    assert result.exit_code == 3
    assert "cannot update pods/proxy" in result.stderr
    assert "kubectl torchrun sync run -n ns" in result.stderr


@pytest.mark.long
def test_the_commands_to_continue_have_the_directory_and_the_overlay(
    laptop: Laptop, tmp_path: Path
) -> None:
    play_controller(laptop.server)
    for name in ("its code", "more"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "code.py").touch()
    interrupt_at(laptop.server, "/proxy/")
    where = ("-C", "../its code", "--overlay", "../more")
    result = laptop.run("submit", "--dev", *where, "--name", "run", "x")
    assert result.exit_code == 130, result.output
    sync = f"kubectl torchrun sync run '{tmp_path}/its code' --overlay={tmp_path}/more"
    assert f"  {sync} -n ns --kubeconfig=" in result.stderr
    assert f"  {sync} --watch -n ns --kubeconfig=" in result.stderr


@pytest.mark.long
@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("torchrunqueues", "Stopped; nothing was created."),
        ("/proxy/", "Stopped before the upload was complete."),
        ("/log", "Detached. The job continues."),
    ],
)
def test_ctrl_c_prints_the_current_state(laptop: Laptop, path: str, message: str) -> None:
    play_controller(laptop.server)
    interrupt_at(laptop.server, path)
    result = laptop.run("submit", "--name", "run", "x")
    assert result.exit_code == 130
    assert message in result.stderr


@pytest.mark.long
def test_ctrl_c_never_deletes_a_job_that_may_be_another_one(laptop: Laptop) -> None:
    interrupt_at(laptop.server, "/torchrunjobs")
    result = laptop.run("run", "--name", "run", "--queue", "q", "x")
    assert result.exit_code == 130
    assert "may or may not exist" in result.stderr
    assert "to delete job" not in result.stderr


@pytest.mark.long
def test_sync_uploads_the_directory_of_a_waiting_job(laptop: Laptop) -> None:
    waiting_job(laptop.server)
    play_controller(laptop.server)
    key = "torchrun.ai/workspace-sha256"
    laptop.server.put("torchrunjobs", "run", metadata={"annotations": {key: "0" * 64}})
    replace_pod = partial(laptop.server.on_create, "run")
    laptop.server.on_patch = lambda: threading.Timer(0.2, replace_pod).start()
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert "Job run expects other content." in result.stderr
    assert laptop.server.uploaded.startswith(b"PK")


@pytest.mark.long
@pytest.mark.parametrize(("conditions", "when"), [([], "now"), (READY, "for its next pods")])
def test_sync_requests_a_new_fetch(
    laptop: Laptop, conditions: list[dict[str, object]], when: str
) -> None:
    waiting_job(laptop.server, conditions=conditions)
    spec = {"volumes": {"workspace": {"source": "git", "url": "https://git.example/a.git"}}}
    laptop.server.put("torchrunjobs", "run", spec=spec)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert f"from git again {when}." in result.stderr
    job = laptop.server.objects["torchrunjobs", "run"]
    assert job["metadata"]["annotations"]["torchrun.ai/sync-requested"]


@pytest.mark.long
@pytest.mark.parametrize(
    ("job", "message"),
    [
        ({"spec": {}}, "run has no workspace (spec.volumes.workspace)"),
        (
            {"spec": {"volumes": {"workspace": {"source": "existing", "claimName": "mine"}}}},
            "its workspace is PVC mine",
        ),
        ({"status": {"phase": "Succeeded", "conditions": READY}}, "it is already Succeeded"),
        ({"status": {"phase": "Failed"}}, "it is already Failed"),
    ],
)
def test_sync_refuses_jobs_that_need_no_upload(
    laptop: Laptop, job: dict[str, object], message: str
) -> None:
    waiting_job(laptop.server)
    laptop.server.put("torchrunjobs", "run", **job)
    result = laptop.run("sync", "run")
    assert result.exit_code == 2
    assert message in result.stderr


@pytest.mark.parametrize("command", ["submit", "sync", "logs"])
def test_help_has_an_example(command: str) -> None:
    result = CliRunner().invoke(cli, [command, "--help"])
    assert f"kubectl torchrun {command} " in result.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--nodes", "1", "--gpus", "1", "x"], "are mutually exclusive"),
        (["--follow", "-o", "name", "x"], "--follow cannot be combined with"),
        (["  "], "COMMAND is empty"),
        (["--epochs", "3", "x"], "add -- before it"),
        ([], "COMMAND is empty"),
        (["--nodes", "0", "x"], "--nodes"),
    ],
)
def test_usage(arguments: list[str], message: str) -> None:
    result = CliRunner().invoke(cli, ["submit", *arguments])
    assert result.exit_code == 2
    assert message in result.stderr
