"""`logs --container`: the pods that prepare a workspace."""

import pytest
from aiohttp import web

from ..laptop import Laptop


def put_helper(
    laptop: Laptop, kind: str, number: int, container: str, *lines: str, **state: object
) -> None:
    """A helper pod with the log of one container, running unless another state is given."""
    name = f"run-{kind}-{number}"
    component = "setup" if kind == "setup" else "sync"
    labels = {"torchrun-job-name": "run", "app.kubernetes.io/component": component}
    statuses = [{"name": container, "state": state or {"running": {}}}]
    status = {"phase": "Running", "containerStatuses": statuses}
    laptop.server.put("pods", name, metadata={"labels": labels}, status=status)
    laptop.server.logs[f"{name}/{container}"] = list(lines)


def line(second: int, text: str) -> str:
    return f"2026-01-01T00:00:{second:02}.000000000Z {text}\n"


@pytest.fixture
def job(laptop: Laptop) -> Laptop:
    laptop.job("run", status={"phase": "Syncing"})
    ended = {"exitCode": 1}
    put_helper(laptop, "sync", 0, "sync", line(1, "clone"), line(3, "timeout"), terminated=ended)
    put_helper(laptop, "sync", 1, "sync", line(2, "clone again"))
    put_helper(laptop, "serve", 2, "serve", line(4, "serving"))
    put_helper(laptop, "setup", 10, "setup", line(5, "pip install"), terminated={"exitCode": 0})
    return laptop


@pytest.mark.long
@pytest.mark.parametrize(
    ("flags", "printed"),
    [
        (["-c", "sync"], ["[0] clone", "[1] clone again", "[0] timeout"]),
        (["-c", "serve"], ["[2] serving"]),
        (["-c", "setup"], ["[10] pip install"]),
        (["-c", "setup", "--follow"], ["[10] pip install"]),
        (["-c", "setup", "--no-prefix"], ["pip install"]),
        (["-c", "sync", "--tail", "1"], ["[1] clone again", "[0] timeout"]),
    ],
)
def test_logs_of_a_container(job: Laptop, flags: list[str], printed: list[str]) -> None:
    result = job.run("logs", "run", *flags)
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines() == printed


@pytest.mark.long
def test_new_lines_of_the_latest_pod_are_followed(job: Laptop) -> None:
    def read(request: web.Request) -> None:
        if request.path.endswith("/log") and request.query["follow"] == "true":
            done = [line(2, "clone again"), line(6, "fetched")]
            put_helper(job, "sync", 1, "sync", *done, terminated={"exitCode": 0})

    job.server.hooks.append(read)
    result = job.run("logs", "run", "-c", "sync", "--follow", "--timestamps")
    assert result.exit_code == 0, result.output
    assert result.stdout.splitlines()[-1] == "[1] 2026-01-01T00:00:06.000000000Z fetched"


@pytest.mark.long
def test_a_pod_that_is_deleted_meanwhile_ends_the_log(job: Laptop) -> None:
    def read(request: web.Request) -> None:
        if request.path.endswith("/pods/run-sync-1"):
            job.server.delete("pods", "run-sync-1")

    job.server.hooks.append(read)
    assert job.run("logs", "run", "-c", "sync", "--follow").exit_code == 0


@pytest.mark.long
def test_no_such_container(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Running"})
    result = laptop.run("logs", "run", "-c", "setup")
    assert result.exit_code == 2
    assert "Job run has no pod whose setup container has started. It is Running." in result.stderr


def test_flags_of_workers_are_refused(laptop: Laptop) -> None:
    result = laptop.run("logs", "run", "-c", "sync", "--node", "1")
    assert result.exit_code == 2
    assert "apply only to --container=trainer" in result.stderr
