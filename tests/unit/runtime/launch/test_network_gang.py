"""From NCCL's log on several nodes to the condition of the job.

The launchers are real, and so is the way of NCCL to its file. torch and NCCL are programs that
write the lines of NCCL 2.32: a GPU is needed for more.
"""

import json
import queue
import textwrap
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import msgspec
import pytest

from torchrun_controller.reconcile.model.observed import ProgressReport, RestartsInPlace
from torchrun_runtime.launch.network import PIPE
from unit.reconcile.job.test_network import messages, running
from unit.runtime.launch.gang.test_gang import Gang, GangFactory, ends, make_gang
from unit.runtime.launch.test_network import TORCH
from unit.runtime.launching import PYTHONS, SECONDS, Launched

__all__ = ["make_gang"]  # a fixture
pytestmark = pytest.mark.long  # processes

# As ncclDebugInit of src/debug.cc: the level, and %h and %p in the path.
RANK = """
    import os, socket, sys, time
    import torch.distributed as dist

    dist.init_process_group("nccl")
    level, path = (os.environ.get(name, "") for name in ("NCCL_DEBUG", "NCCL_DEBUG_FILE"))
    path = path.replace("%h", socket.gethostname()).replace("%p", str(os.getpid()))
    file = open(path, "w", buffering=1) if level and path else sys.stdout
    prefix = f"{socket.gethostname()}:{os.getpid()}:{os.getpid()} [0] NCCL "
    network = "Socket" if os.environ["NODE_RANK"] == os.environ.get("SLOW", "") else "IB"
    lines = (
        "INFO NET/IB : Using [0]mlx5_0:1/IB [1]mlx5_1:1/IB [RO]; OOB eth0:10.0.4.51<0>",
        "INFO NET/Socket : Using [0]eth0:10.0.4.51<0>",
        f"INFO Using network {network}",
        f"INFO Channel 00/0 : 0[0] -> 1[0] [send] via NET/{network}/0",
        "WARN Call to ibv_modify_qp failed",
    )
    for line in lines:
        if level in ("INFO", "info") or (level and line.startswith("WARN")):
            file.write(f"{prefix}{line}\\n")
    print("trained", flush=True)
    while not os.path.exists(os.environ["SHARED"] + "/go"):
        time.sleep(0.01)
"""


class Reports:
    """The port of the controller for reports. `bodies` has what it got."""

    def __init__(self) -> None:
        self.bodies: queue.Queue[object] = queue.Queue()
        bodies = self.bodies

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                bodies.put(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
                self.send_response(204)
                self.end_headers()

            def log_message(self, *arguments: object) -> None:
                pass

        self._server = HTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def await_network(self, nodes: int) -> RestartsInPlace:
        """The report that counts so many nodes, as the controller decodes it."""
        while True:
            report = msgspec.convert(self.bodies.get(timeout=SECONDS), ProgressReport)
            assert report.restarts_in_place is not None
            if sum(use.nodes for use in report.restarts_in_place.network) == nodes:
                return report.restarts_in_place

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class TrainedGang(Gang):
    """Three nodes, and a controller that takes their reports."""

    def __init__(self, python: str, directory: Path) -> None:
        super().__init__(python, directory, 3)
        self.go = self.launchers[0].directory / "go"
        self.reports = Reports()
        for launcher in self.launchers:
            for name, text in {**TORCH, "train.py": textwrap.dedent(RANK)}.items():
                path = launcher.directory / name
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(text.replace("VERSION", "(2, 32, 3)"))
        (directory / "token").write_text("secret")
        self._token = str(directory / "token")

    def train(self, **more: str) -> list[Launched]:
        self.annotate(start="1")
        return self.start(
            "python3 train.py",
            TORCHRUN_PROGRESS_URL=self.reports.url,
            TORCHRUN_PROGRESS_TOKEN_FILE=self._token,
            **more,
        )


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def gang(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[TrainedGang]:
    gang = TrainedGang(request.param, tmp_path)
    yield gang
    gang.reports.close()
    for launcher in gang.launchers:
        launcher.clear()


def test_a_node_that_uses_tcp_is_named_in_the_condition(gang: TrainedGang) -> None:
    launched = gang.train(SLOW="2")
    report = gang.reports.await_network(nodes=3)
    gang.go.touch()
    results = ends(launched)
    assert [(result.exit_code, result.out) for result in results] == [(0, "trained\n")] * 3
    assert "torchrun-launch: NCCL uses IB\n" in results[0].err
    assert "torchrun-launch: NCCL uses Socket over eth0\n" in results[2].err
    for result in results:
        assert result.err.count(" NCCL WARN Call to ibv_modify_qp failed\n") == 1
        assert "NCCL INFO" not in result.err

    world = running()
    child = world.observed().gang.current_job.metadata.uid
    world.reports.put_restarts(("ml", "train"), child, report)
    world.step()
    assert messages(world) == ["Node 2 uses Socket over eth0, the others IB."]
    assert json.loads(msgspec.json.encode(world.job.status))["network"] == [
        {"transport": "IB", "nodes": 2},
        {"transport": "Socket", "device": "eth0", "nodes": 1, "firstNode": 2},
    ]


@pytest.mark.parametrize(
    ("variables", "lines"),
    [
        ({"NCCL_DEBUG": "WARN"}, 1),
        ({"NCCL_DEBUG": "INFO"}, 5),
        ({"NCCL_DEBUG_SUBSYS": "NET"}, 0),
    ],
)
def test_output_that_the_user_asked_for_stays_where_it_was(
    gang: TrainedGang, variables: dict[str, str], lines: int
) -> None:
    launched = gang.train(SLOW="2", **variables)
    for each in launched:
        printed = list(iter(each.line, "trained"))
        assert len([line for line in printed if " NCCL " in line]) == lines
    gang.go.touch()
    for result in ends(launched):
        assert (result.exit_code, "NCCL" in result.err) == (0, False)
    assert gang.reports.bodies.empty()


@pytest.mark.parametrize(
    ("nodes", "variables", "has_pipe"),
    [
        (2, {"TORCHRUN_PROGRESS_URL": "http://127.0.0.1:1"}, True),
        (1, {"TORCHRUN_PROGRESS_URL": "http://127.0.0.1:1"}, False),
        (2, {}, False),  # a run on one machine has no controller
    ],
)
def test_only_nodes_of_a_gang_with_a_controller_have_the_pipe(
    make_gang: GangFactory, nodes: int, variables: dict[str, str], has_pipe: bool
) -> None:
    gang = make_gang(nodes)
    gang.annotate(start="1")
    for end in ends(gang.start('ls "$TORCHRUN_LAUNCH_REPORTS"', **variables)):
        assert (end.exit_code, PIPE in end.out) == (0, has_pipe)
