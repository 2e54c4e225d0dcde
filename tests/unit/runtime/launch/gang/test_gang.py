"""The launchers of several nodes on this machine, each a process as in a pod."""

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from ports import free_port
from unit.runtime.launching import PYTHONS, Launched, Launcher, Result
from unit.runtime.serving import publish

pytestmark = pytest.mark.long  # processes

RESTARTS = json.dumps({"restarts": 3, "exitCodes": [42], "signals": []})


class Gang:
    """Nodes with a directory each. Only node 0 has the annotations of the controller."""

    def __init__(self, python: str, directory: Path, size: int) -> None:
        self.launchers = []
        self.port = free_port()
        for node in range(size):
            (directory / str(node)).mkdir()
            self.launchers.append(Launcher(python, directory / str(node)))

    def annotate(self, **annotations: str) -> None:
        """Write the annotations of node 0 as the kubelet does."""
        self.annotate_pod(0, **{f"torchrun.ai/{k}": v for k, v in annotations.items()})

    def annotate_pod(self, node: int, **annotations: str) -> None:
        file = self.launchers[node].directory / "annotations"
        new = file.with_suffix(".new")
        new.write_text("".join(f'{k}="{v}"\n' for k, v in annotations.items()))
        new.rename(file)

    def start(self, command: str, nodes: "list[int] | None" = None, **more: str) -> list[Launched]:
        return [self.start_node(n, command, **more) for n in nodes or range(len(self.launchers))]

    def start_node(self, node: int, command: str, **more: str) -> Launched:
        launcher = self.launchers[node]
        return launcher.start(
            command,
            TORCHRUN_LAUNCHER="none",
            TORCHRUN_START_FILE=str(launcher.directory / "annotations"),
            TORCHRUN_GANG_PORT=str(self.port),
            PET_NNODES=str(len(self.launchers)),
            NODE_RANK=str(node),
            **{
                "PET_MASTER_ADDR": "127.0.0.1",
                "SHARED": str(self.launchers[0].directory),
                "TORCHRUN_ATTEMPT": "1",
                "TORCHRUN_IN_PLACE_RESTARTS": RESTARTS,
                "TORCHRUN_JOB_UID": "uid",
            }
            | more,
        )


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def make_gang(request: pytest.FixtureRequest, tmp_path: Path) -> "Iterator[GangFactory]":
    factory = GangFactory(request.param, tmp_path)
    yield factory
    for gang in factory.gangs:
        for launcher in gang.launchers:
            launcher.clear()


class GangFactory:
    def __init__(self, python: str, directory: Path) -> None:
        self.gangs: list[Gang] = []
        self._python, self._directory = python, directory

    def __call__(self, size: int) -> Gang:
        self.gangs.append(Gang(self._python, self._directory, size))
        return self.gangs[-1]


def ends(running: list[Launched]) -> list[Result]:
    return [launched.end() for launched in running]


def await_line(launched: Launched, text: str) -> str:
    """Read the log of the launcher up to a line with this text."""
    assert launched.process.stderr
    for line in launched.process.stderr:
        if text in line:
            return line
    raise AssertionError(f"ended without {text!r}")


def test_no_node_starts_before_the_gate_of_node_0_is_open(make_gang: GangFactory) -> None:
    gang = make_gang(3)
    running = gang.start("echo started")
    await_line(running[0], "waiting at the start gate")
    assert [launched.process.poll() for launched in running] == [None] * 3
    gang.annotate(start="1")
    assert [(end.exit_code, end.out) for end in ends(running)] == [(0, "started\n")] * 3


def test_no_node_starts_before_every_node_is_there(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    running = gang.start("echo started", nodes=[0])
    await_line(running[0], "waiting for node 1 of the gang")
    assert running[0].process.poll() is None
    running += gang.start("echo started", nodes=[1])
    assert [end.out for end in ends(running)] == ["started\n"] * 2


def test_a_node_says_why_it_cannot_reach_the_first_one(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    running = gang.start("true", nodes=[1])
    line = await_line(running[0], "waiting for node 0 of the gang")
    assert f"at 127.0.0.1:{gang.port}: [Errno 111] Connection refused" in line


def test_the_key_of_the_gang_decides_who_takes_part_and_no_command_sees_it(
    make_gang: GangFactory,
) -> None:
    """A viewer reads the UID and the attempt of a job, and its logs."""
    gang = make_gang(2)
    gang.annotate(start="1")
    command = "printenv TORCHRUN_GANG_KEY || echo started"
    leader = gang.start_node(0, command, TORCHRUN_GANG_KEY="random")
    viewer = gang.start_node(1, command)
    await_line(viewer, "waiting for node 0 of the gang")
    viewer.process.terminate()
    assert viewer.end().out == ""
    member = gang.start_node(1, command, TORCHRUN_GANG_KEY="random")
    assert [end.out for end in ends([leader, member])] == ["started\n"] * 2


# Node 1 fails in the first two rounds, once all nodes run. The others would sleep for ever. Both fail
# in the same way: a second round that fails sooner in another way has found leftovers of the first.
FAILS_TWICE = """
echo "round $TORCHRUN_ROUND"
touch "$SHARED/$TORCHRUN_ROUND-$NODE_RANK"
[ "$TORCHRUN_ROUND" = 2 ] && exit 0
[ "$NODE_RANK" = 1 ] || exec sleep 1000
for node in $(seq 0 $((PET_NNODES - 1))); do
  while [ ! -e "$SHARED/$TORCHRUN_ROUND-$node" ]; do sleep 0.05; done
done
exit 3
"""


def test_a_failure_restarts_the_ranks_of_all_nodes_in_the_same_pods(make_gang: GangFactory) -> None:
    gang = make_gang(3)
    gang.annotate(start="1")
    results = ends(gang.start(FAILS_TWICE))
    assert [(r.exit_code, r.out) for r in results] == [(0, "round 0\nround 1\nround 2\n")] * 3
    assert [r.message for r in results] == [{}] * 3
    assert results[1].err.count("failed with exit code 3") == 2


def test_in_development_each_node_says_that_it_waits_for_an_edit(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    claim = gang.launchers[0].directory / "claim"
    publish(claim, {"train.sh": b'[ "$NODE_RANK" = 1 ] && exit 3; exec sleep 1000'})
    gang.annotate(start="1", revision="1", development="true")
    running = [
        gang.start_node(
            node,
            "exec sh train.sh",
            TORCHRUN_WORKSPACE_SOURCE=str(claim),
            TORCHRUN_WORKSPACE_TARGET=str(gang.launchers[node].directory / "app"),
        )
        for node in range(2)
    ]
    await_line(running[0], "the pod waits for newer code after the failure of another node")
    await_line(running[1], "the pod waits for the next edit")
    for launched in running:
        launched.stop()
    assert ends(running)[1].exit_code == 3


def test_without_restarts_a_failure_ends_its_own_pod_only(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    running = gang.start(FAILS_TWICE, TORCHRUN_IN_PLACE_RESTARTS="")
    result = running[1].end()
    assert (result.exit_code, result.message["reason"]) == (3, "ExitCode")
    assert running[0].process.poll() is None
    running[0].stop()
    assert running[0].end().message["reason"] == "Stopped"


def test_after_the_last_restart_each_node_reports_its_own_end(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    once = json.dumps({"restarts": 1, "exitCodes": [], "signals": []})
    results = ends(gang.start(FAILS_TWICE, TORCHRUN_IN_PLACE_RESTARTS=once))
    assert [(r.exit_code, r.message["reason"]) for r in results] == [
        (143, "PeerFailed"),
        (3, "ExitCode"),
    ]
    assert [r.message["restartsInPlace"] for r in results] == [1, 1], "each pod may be seen first"


def test_an_exit_code_of_a_rule_is_left_to_the_controller(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    results = ends(gang.start('[ "$NODE_RANK" = 1 ] && exit 42; sleep 1000'))
    assert [r.exit_code for r in results] == [143, 42]


# Node 0 tries an import first: in a shell, or in a child of its rank. Node 1 fails after that.
TRIES = "{python} -c 'import flash_attn' || touch $SHARED/tried-$TORCHRUN_ROUND; "
TRIES_IN_RANK = """
import os, subprocess, sys
if "LOCAL_RANK" not in os.environ:
    os.environ.update(LOCAL_RANK="0", RANK="0")
    sys.exit(subprocess.call([sys.executable, __file__]))
subprocess.call(["sh", "-c", os.environ["TRIES"] + "sleep 1000"])
"""
FAILS_AFTER = "while [ ! -e $SHARED/tried-$TORCHRUN_ROUND ]; do sleep 0.05; done; exit 42"


@pytest.mark.parametrize("in_rank", [True, False], ids=["rank", "shell"])
def test_a_failure_that_a_node_survives_is_not_the_cause(
    make_gang: GangFactory, in_rank: bool
) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    python = gang.launchers[0].python
    tries = TRIES.format(python=python)
    (gang.launchers[0].directory / "rank.py").write_text(TRIES_IN_RANK)
    first = f"{python} rank.py" if in_rank else f"{tries} exec sleep 1000"
    results = ends([gang.start_node(0, first, TRIES=tries), gang.start_node(1, FAILS_AFTER)])
    assert "No module named 'flash_attn'" in results[0].err
    assert [(r.exit_code, r.message["reason"]) for r in results] == [
        (143, "PeerFailed"),
        (42, "ExitCode"),
    ]


# Node 0 fails first in each round, but its process ends late.
ENDS_LATE = """
import atexit, os, pathlib, time
tried = pathlib.Path(os.environ["SHARED"], "tried-" + os.environ["TORCHRUN_ROUND"])
atexit.register(lambda: (tried.touch(), time.sleep(1000)))
raise ValueError("loss is nan")
"""


def test_a_failure_just_before_that_of_another_node_is_a_cause(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    (gang.launchers[0].directory / "late.py").write_text(ENDS_LATE)
    first = f"{gang.launchers[0].python} late.py"
    results = ends([gang.start_node(0, first), gang.start_node(1, FAILS_AFTER)])
    assert [(r.exit_code, r.message["reason"]) for r in results] == [
        (1, "Exception"),
        (42, "ExitCode"),
    ]
    assert "failed with exit code 1: ValueError: loss is nan" in results[0].err


def test_a_node_that_has_succeeded_runs_again_after_a_failure(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    done = gang.launchers[0].directory / "done"
    command = f"""
    echo "round $TORCHRUN_ROUND"
    if [ "$NODE_RANK" = 0 ]; then touch {done}
    elif [ "$TORCHRUN_ROUND" = 0 ]; then while [ ! -e {done} ]; do sleep 0.05; done; exit 3; fi
    """
    results = ends(gang.start(command))
    assert [(r.exit_code, r.out) for r in results] == [(0, "round 0\nround 1\n")] * 2


def test_a_pod_that_kubernetes_ends_does_not_disturb_the_others(make_gang: GangFactory) -> None:
    gang = make_gang(3)
    gang.annotate(start="1")
    ready = [launcher.directory / "saved" for launcher in gang.launchers]
    running = gang.start(
        "trap 'exit 5' TERM; echo up; while [ ! -e end ]; do sleep 0.05; done; echo saved"
    )
    for launched in running:
        assert launched.line() == "up"
    running[1].stop()
    assert running[1].end().exit_code == 143
    for node in (0, 2):
        (ready[node].parent / "end").touch()
    results = [running[node].end() for node in (0, 2)]
    assert [(r.exit_code, r.out) for r in results] == [(0, "saved\n")] * 2


def test_a_pod_waits_without_limit_while_node_0_has_no_address(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate_pod(1, **{"torchrun.ai/start": "1"})
    lost = {"PET_MASTER_ADDR": "lost.invalid", "TORCHRUN_RESOLVE_WAIT_SECONDS": "0.1"}
    new = gang.start_node(1, "true", **lost)
    await_line(new, "waiting for node 0 of the gang at lost.invalid")


def test_a_node_ends_when_the_first_node_is_gone(
    make_gang: GangFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    running = gang.start('echo up; [ "$NODE_RANK" = 0 ] && sleep 1000; exit 0')
    for launched in running:
        assert launched.line() == "up"
    gang.launchers[0].clear()
    result = running[1].end()
    assert (result.exit_code, "the first node of the gang is gone" in result.err) == (0, True)


def test_a_node_that_the_network_separates_from_the_first_one_ends_with_advice(
    make_gang: GangFactory,
) -> None:
    gang = make_gang(2)
    unreachable = {"PET_MASTER_ADDR": "240.0.0.1", "TORCHRUN_RESOLVE_WAIT_SECONDS": "1"}
    result = gang.start_node(1, "true", **unreachable).end()
    assert (result.exit_code, result.message["reason"]) == (125, "ChannelFailed")
    assert "cannot reach node 0 of the gang at 240.0.0.1" in str(result.message["message"])
    assert "network policies" in str(result.message["message"])


def test_a_taken_port_ends_the_first_node_with_advice(make_gang: GangFactory) -> None:
    gang = make_gang(2)
    gang.annotate(start="1")
    with socket.create_server(("", gang.port)):
        result = gang.start_node(0, "true").end()
    assert (result.exit_code, result.message["reason"]) == (125, "ChannelFailed")
    assert f"port {gang.port}" in str(result.message["message"])
