"""The command `logs`, with the proxy of kubectl and an API server in memory."""

import pytest

from ..laptop import LABELS, Laptop, interrupt_at, play_controller, waiting_job

pytestmark = pytest.mark.long  # processes


def test_logs_of_the_newest_attempt_are_merged(laptop: Laptop) -> None:
    waiting_job(laptop.server)
    play_controller(laptop.server, "Failed")
    laptop.server.on_upload()
    for rank in (0, 1):
        labels = {
            **LABELS,
            "app.kubernetes.io/component": "worker",
            "torchrun.ai/attempt": "1",
            "batch.kubernetes.io/job-completion-index": str(rank),
        }
        status = {"containerStatuses": [{"name": "trainer", "state": {"running": {}}}]}
        laptop.server.put("pods", f"run-r1-{rank}", metadata={"labels": labels}, status=status)
        line = f"2026-01-01T00:00:00.{9 - rank:09}Z again {rank}\n"
        laptop.server.logs[f"run-r1-{rank}"] = [line]
    assert laptop.run("logs", "run").stdout == "[1] again 1\n[0] again 0\n"
    assert laptop.run("logs", "run", "-r", "0").stdout == "[0] again 0\n"
    assert laptop.run("logs", "run", "-r", "7").exit_code == 2


def test_following_logs_ends_with_the_runs_result(laptop: Laptop) -> None:
    waiting_job(laptop.server)
    play_controller(laptop.server, "Failed")
    laptop.server.on_upload()
    result = laptop.run("logs", "run", "--follow")
    assert result.exit_code == 1
    assert len(result.stdout.splitlines()) == 6


def test_ctrl_c_while_following_logs(laptop: Laptop) -> None:
    waiting_job(laptop.server)
    interrupt_at(laptop.server, "/pods")
    assert laptop.run("logs", "run", "--follow").exit_code == 130


def test_logs_of_a_missing_job(laptop: Laptop) -> None:
    result = laptop.run("logs", "nothing")
    assert result.exit_code == 2
    assert "kubectl torchrun list -n ns" in result.stderr
