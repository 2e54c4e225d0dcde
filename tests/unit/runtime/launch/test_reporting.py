"""Reports from a rank to the controller, with a real launcher, token file and HTTP server."""

import json
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from typing import Any

import pytest

from unit.runtime.launching import Launcher, changed

pytestmark = pytest.mark.long  # processes

# The launcher gives up a report within seconds, which a busy machine may need for its requests.
LIMITS = {
    "_PAUSE_SECONDS = 10.0": "_PAUSE_SECONDS = 1000.0",
    "_REPORT_SECONDS = 1.5": "_REPORT_SECONDS = 60.0",
    "_TIMEOUT = 5.0": "_TIMEOUT = 60.0",
    "_LAST_SECONDS = 2.0": "_LAST_SECONDS = 60.0",
}


@pytest.fixture
def launcher(launcher: Launcher) -> Launcher:
    """The launcher with these limits."""
    return changed(launcher, {"reporting.py": LIMITS})


class Controller:
    """Responds with `codes`, then with 204, and records the reports.

    awaited: the number of requests after which the training continues, by the file `go`.
    """

    def __init__(self, go: Path) -> None:
        self.codes: list[int] = []
        self.retry_after = ""
        self.text = b""
        self.awaited = 1
        self.taken: list[tuple[str, str, dict[str, object]]] = []
        controller = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                controller.taken.append((self.path, self.headers["Authorization"], body))
                code = controller.codes.pop(0) if controller.codes else 204
                self.send_response(code)
                if code != 204 and controller.retry_after:
                    self.send_header("Retry-After", controller.retry_after)
                if code == 302:
                    self.send_header("Location", "http://127.0.0.1:1/elsewhere")
                self.end_headers()
                self.wfile.write(controller.text)
                if len(controller.taken) == controller.awaited:
                    go.touch()

            def log_message(self, *arguments: object) -> None:
                pass

        self.server = HTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_address[1]}"

    def stop(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


TRAINING = """
    import os, time
    from torchrun_progress import report
    report(step=1, total=3)
    while not os.path.exists("go"): time.sleep(0.01)
    report(step=3, loss=0.5)
"""


def train(launcher: Launcher, url: str, rank: int = 0) -> str:
    (launcher.directory / "train.py").write_text(textwrap.dedent(TRAINING))
    secret = launcher.directory / "token"
    secret.write_text("secret\n")
    result = launcher.run(
        [launcher.python, "train.py"],
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_PROGRESS_URL=url,
        TORCHRUN_PROGRESS_TOKEN_FILE=str(secret),
        HTTP_PROXY="http://127.0.0.1:1",
        http_proxy="http://127.0.0.1:1",
        RANK=str(rank),
    )
    assert result.exit_code == 0
    return result.err


@pytest.fixture
def go(launcher: Launcher) -> Path:
    """The file for which the training waits after its first report."""
    return launcher.directory / "go"


@pytest.fixture
def controller(go: Path) -> Iterator[Controller]:
    controller = Controller(go)
    yield controller
    controller.stop()


def test_values_of_rank_0_arrive_and_the_last_ones_at_the_end(
    launcher: Launcher, controller: Controller
) -> None:
    train(launcher, controller.url)
    first, last = controller.taken
    assert first == ("/v1/progress", "Bearer secret", {"step": 1, "totalSteps": 3})
    assert last[2] == {"step": 3, "totalSteps": 3, "loss": 0.5}


def test_other_ranks_send_nothing(launcher: Launcher, controller: Controller, go: Path) -> None:
    go.touch()
    train(launcher, controller.url, rank=1)
    assert controller.taken == []


def test_a_report_is_retried_until_the_leader_answers(
    launcher: Launcher, controller: Controller
) -> None:
    controller.codes, controller.awaited = [503] * 3, 4
    assert "progress" not in train(launcher, controller.url)
    assert [body["step"] for _, _, body in controller.taken] == [1] * 4 + [3]


def test_the_last_report_reaches_the_leader_too(launcher: Launcher, controller: Controller) -> None:
    controller.codes = [204, *[503] * 3]
    train(launcher, controller.url)
    assert [body["step"] for _, _, body in controller.taken] == [1] + [3] * 4


def test_the_last_report_is_retried_after_a_429(launcher: Launcher, controller: Controller) -> None:
    controller.codes, controller.retry_after = [204, 429], "1"
    train(launcher, controller.url)
    assert [body["step"] for _, _, body in controller.taken] == [1, 3, 3]


def test_a_refused_report_is_not_repeated_before_retry_after(
    launcher: Launcher, controller: Controller
) -> None:
    controller.codes, controller.retry_after = [503], "100"
    train(launcher, controller.url)
    assert [body["step"] for _, _, body in controller.taken] == [1, 3]


@pytest.mark.parametrize("code", [302, 403, 500])
def test_a_refusal_is_logged_once_and_redirects_are_not_followed(
    launcher: Launcher, controller: Controller, code: int
) -> None:
    controller.codes = [code] * 10
    log = train(launcher, controller.url)
    assert log.count("the controller does not accept the report: HTTP") == 1
    assert len(controller.taken) == 2


def test_a_refusal_is_logged_with_200_bytes_of_its_text(
    launcher: Launcher, controller: Controller
) -> None:
    controller.codes, controller.text = [403, 403], b"x" * 300
    log = train(launcher, controller.url)
    assert f"the controller does not accept the report: HTTP 403 {'x' * 200}\n" in log


def test_an_unreachable_controller_does_not_delay_the_ranks(launcher: Launcher, go: Path) -> None:
    go.touch()
    log = train(launcher, "http://127.0.0.1:1")
    assert log.count("the controller does not accept the report: Connection") == 1


# The first two rounds fail, the first one before rank 0 has reported a step.
FAILING = """
    import os, sys, time
    from torchrun_progress import report
    number = int(os.environ["TORCHRUN_ROUND"])
    if number == 0: sys.exit(3)
    report(step=number)
    if number == 1: raise KeyError("x")
    while not os.path.exists("go"): time.sleep(0.01)
    sys.exit(7)
"""


def test_restarts_in_place_are_reported_and_in_the_termination_message(
    launcher: Launcher, controller: Controller
) -> None:
    (launcher.directory / "train.py").write_text(textwrap.dedent(FAILING))
    (launcher.directory / "token").write_text("secret")
    controller.awaited = 3
    result = launcher.run(
        [launcher.python, "train.py"],
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_PROGRESS_URL=controller.url,
        TORCHRUN_PROGRESS_TOKEN_FILE=str(launcher.directory / "token"),
        TORCHRUN_IN_PLACE_RESTARTS=json.dumps({"restarts": 2, "exitCodes": [], "signals": []}),
        RANK="0",
    )
    assert (result.exit_code, result.message["restartsInPlace"]) == (7, 2)
    bodies = [body for _, _, body in controller.taken]
    steps = [body["step"] for body in bodies if "step" in body]
    counts = [restarts_of(body)["count"] for body in bodies if "step" not in body]
    assert (steps, counts) == ([1, 2], [1, 2])
    last = restarts_of([body for body in bodies if "step" not in body][-1])
    first, second = last["last"]
    assert (first["round"], first["node"], first["exitCode"]) == (0, 0, 3)
    assert (second["round"], second["reason"], second["message"]) == (
        1,
        "Exception",
        "KeyError: 'x'",
    )
    assert second["seconds"] > 0


def restarts_of(body: dict[str, object]) -> dict[str, Any]:
    restarts = body.get("restartsInPlace", {})
    assert isinstance(restarts, dict)
    return restarts


def test_a_gang_that_had_to_fence_older_workers_reports_its_start(
    launcher: Launcher, controller: Controller, go: Path
) -> None:
    state = launcher.directory / "state"
    state.mkdir()
    # An earlier pod of this gang has waited until the older workers were fenced.
    (state / "passed").write_text(json.dumps({"attempt": 2, "job": "uid"}))
    file = launcher.directory / "annotations"
    order = 'torchrun.ai/fence="2026-01-02T03:04:05Z 1:0-3"'
    file.write_text(f'torchrun.ai/start="2"\n{order}\n')
    secret = launcher.directory / "token"
    secret.write_text("secret\n")
    result = launcher.run(
        "until test -e go; do sleep 0.01; done",
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_JOB_UID="uid",
        TORCHRUN_ATTEMPT="2",
        TORCHRUN_START_FILE=str(file),
        TORCHRUN_STATE_DIR=str(state),
        TORCHRUN_PROGRESS_URL=controller.url,
        TORCHRUN_PROGRESS_TOKEN_FILE=str(secret),
    )
    assert result.exit_code == 0
    assert [restarts_of(body) for _, _, body in controller.taken] == [{"count": 0, "last": []}]


def test_a_failed_command_that_waits_for_an_edit_is_reported_until_the_next_round(
    launcher: Launcher, controller: Controller
) -> None:
    directory = launcher.directory
    (directory / "train.py").write_text('raise KeyError("x")')
    (directory / "token").write_text("secret")
    lines = ('torchrun.ai/start="0"', 'torchrun.ai/development="true"', 'torchrun.ai/revision="%d"')
    annotations = "\n".join(lines) + "\n"
    (directory / "annotations").write_text(annotations % 0)
    launched = launcher.start(
        [launcher.python, "train.py"],
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_ATTEMPT="0",
        TORCHRUN_PROGRESS_URL=controller.url,
        TORCHRUN_PROGRESS_TOKEN_FILE=str(directory / "token"),
        TORCHRUN_START_FILE=str(directory / "annotations"),
        TORCHRUN_WORKSPACE_SOURCE=str(directory),
        TORCHRUN_WORKSPACE_TARGET=str(directory),
    )
    assert launched.process.stderr
    assert any("waits for the next edit" in line for line in launched.process.stderr)
    (directory / "train.py").write_text("")
    (directory / "annotations").write_text(annotations % 1)
    assert launched.end().exit_code == 0
    waiting, running = [restarts_of(body) for _, _, body in controller.taken]
    failed = waiting["awaitsEdit"]
    assert (failed["round"], failed["node"], failed["message"]) == (0, 0, "KeyError: 'x'")
    assert running == {"count": 0, "last": []}
