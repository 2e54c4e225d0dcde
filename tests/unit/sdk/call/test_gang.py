"""Calls end to end: a client, a kubectl on a folder, and real ranks without a cluster."""

import importlib
import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import ModuleType

import pytest

import torchrun_sdk as kt
from torchrun_sdk import cli
from torchrun_sdk.call import connections, reattach
from torchrun_sdk.call import log as call_log
from torchrun_sdk.call import monitor as call_monitor
from torchrun_sdk.call.gang import Gang
from torchrun_sdk.cluster import watch
from torchrun_sdk.cluster.kubectl import Kubectl
from torchrun_sdk.serialization import pack
from torchrun_sdk.spec import Exited, Result, Started, encode

from ..pods import SECONDS, WAITS, changing_job, delete_job, replace_text

pytestmark = pytest.mark.long  # processes

MODULE = """
import os, time
from pathlib import Path

def add(a, b=1):
    print("adds", a, flush=True)
    return a + b

def ranks(): return int(os.environ["RANK"])
def fails(): raise ValueError("no such data")
def leaves(): os._exit(9)

def sleeps(seconds):
    time.sleep(seconds)
    return "slept"

def waits(file):
    while not os.path.exists(file): time.sleep(0.05)
    return "waited"

def half():
    if os.environ["RANK"] == "1":
        raise OSError("gone")
    time.sleep(600)
"""
FAST = kt.Compute(idle_time=WAITS)


@pytest.fixture
def user(cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """A user's module in a project."""
    # Long, for a busy machine. No test here waits for lost pods or for the output of lost pods.
    monkeypatch.setattr(call_monitor, "_ANSWER_SECONDS", 100.0)
    monkeypatch.setattr(call_monitor, "_LAST_LINES", 100.0)
    monkeypatch.setattr(connections, "_LAST_WORDS", 100.0)
    project = tmp_path / "project"
    project.mkdir()
    (project / "torchrun.toml").touch()
    (project / "work.py").write_text(MODULE)
    monkeypatch.syspath_prepend(str(project))
    monkeypatch.setattr(sys, "dont_write_bytecode", True)
    sys.modules.pop("work", None)
    yield importlib.import_module("work")
    sys.modules.pop("work", None)


def asked(cluster: Path) -> str:
    return (cluster / "commands").read_text()


def until(ready: Callable[[], object]) -> None:
    deadline = time.monotonic() + SECONDS
    while not ready():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def until_running(cluster: Path) -> None:
    """Wait for the phase with which other programs use warm pods. A call may return before."""
    until(lambda: '"Running"' in (cluster / "job.json").read_text())


def test_a_call_returns_and_its_log_is_printed(
    cluster: Path,
    user: ModuleType,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(call_log, "_LAST_LINES", 100.0)
    (cluster / "state").mkdir()
    remote = kt.fn(user.add).to(kt.Compute(namespace="ml"))
    assert remote(41) == 42
    output = capsys.readouterr()
    assert "[0] adds 41" in output.out
    assert "requested 1 worker(s)" in output.err
    assert "kubectl --namespace=ml get torchrunjob" in asked(cluster)
    job = json.loads((cluster / "job.json").read_text())
    assert job["metadata"]["labels"] == {"torchrun.ai/sdk": "function"}
    # Stored results can be read again, in Python and by kt.
    assert kt.attach(job["metadata"]["name"], namespace="ml") == 42
    assert cli.main(["results", job["metadata"]["name"]]) == 0
    assert capsys.readouterr().out == "42\n"


@pytest.mark.parametrize(
    ("namespace", "own", "expected"),
    [("team-b", "", "team-b"), ("", "", "default"), ("team-b", "team-c", "team-c")],
)
def test_every_command_selects_the_same_cluster_and_namespace(
    cluster: Path, user: ModuleType, namespace: str, own: str, expected: str
) -> None:
    """The plugin would use those of torchrun.toml, in which the user has no other commands."""
    context = {"name": "lab", "context": {"cluster": "c", "namespace": namespace}}
    config = {"current-context": "lab", "contexts": [context]}
    (cluster / "kubeconfig").write_text(json.dumps(config))
    assert kt.fn(user.add).to(kt.Compute(namespace=own))(1) == 2
    (cluster / "slow").touch()
    kt.App("a", "true", compute=kt.Compute(namespace=own), directory=cluster).deploy()
    lines = [line for line in asked(cluster).splitlines() if "config view" not in line]
    assert {line.split()[0] for line in lines} == {"kubectl", "kubectl-torchrun"}
    assert {tuple(line.split()[1:3]) for line in lines} == {
        ("--context=lab", f"--namespace={expected}")
    }


def test_a_torchrun_toml_does_not_change_calls_of_the_plugin(
    cluster: Path, user: ModuleType
) -> None:
    """For example its `name` and `wait`."""
    assert kt.fn(user.add).to(kt.Compute())(1) == 2
    calls = [line.split() for line in asked(cluster).splitlines() if "kubectl-torchrun" in line]
    assert len(calls) > 1
    assert all("--no-defaults" in call for call in calls)


@pytest.mark.parametrize("config", ["", "{}", "no JSON", '{"contexts": []}'])
def test_commands_work_without_a_context(cluster: Path, config: str) -> None:
    (cluster / "kubeconfig").write_text(config)
    Kubectl().run("get", "pods")
    assert asked(cluster).splitlines()[-1] == "kubectl get pods"


def test_in_a_pod_commands_select_the_namespace_of_its_service_account(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "namespace").write_text("team-a\n")
    file = "torchrun_sdk.cluster.kubectl._SERVICE_ACCOUNT_NAMESPACE"
    monkeypatch.setattr(file, tmp_path / "namespace")
    Kubectl().run("get", "pods")
    assert asked(cluster).splitlines()[-1] == "kubectl --namespace=team-a get pods"


@pytest.mark.long
def test_results_of_all_ranks_or_of_the_head(cluster: Path, user: ModuleType) -> None:
    remote = kt.fn(user.ranks).to(kt.Compute()).distribute(workers=2)
    assert remote.options(stream_logs=False)() == [0, 1]
    delete_job(cluster)
    assert remote.options(returns="head", stream_logs=False)() == 0


@pytest.mark.long
def test_an_exception_and_a_silent_end(cluster: Path, user: ModuleType) -> None:
    with pytest.raises(kt.RemoteException, match="no such data") as raised:
        kt.fn(user.fails).to(kt.Compute())()
    assert (raised.value.rank, raised.value.type) == (0, "builtins.ValueError")
    with pytest.raises(kt.RankExited) as exited:
        kt.fn(user.leaves).to(kt.Compute())()
    assert exited.value.exit_code == 9


def test_warm_pods_run_edited_code_and_survive_failures(
    cluster: Path, user: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    remote = kt.fn(user.add).to(FAST).distribute(workers=2)
    assert remote(1) == [2, 2]
    file = Path(user.__file__)
    file.write_text(MODULE.replace("a + b", "a - b"))
    capsys.readouterr()
    assert remote(2) == [1, 1]
    assert sorted(capsys.readouterr().out.split("\n")) == ["", "[0] adds 2", "[1] adds 2"]
    assert asked(cluster).count("submit") == 1
    # Another Remote, as in another program, uses the same pods.
    until_running(cluster)
    for function, error in ((user.half, kt.RemoteException), (user.leaves, kt.RankExited)):
        other = kt.fn(function).to(FAST).distribute(workers=2)
        assert "sdk-gang" in asked(cluster)
        with changing_job(cluster) as job:
            job["metadata"]["labels"]["torchrun.ai/sdk-gang"] = _key(other, user)
        with pytest.raises(error):
            other()
    assert asked(cluster).count("submit") == 1
    remote.down()
    assert not (cluster / "job.json").exists()


def _key(remote: kt.Remote, user: ModuleType) -> str:
    from torchrun_sdk.cluster.manifest import gang_key
    from torchrun_sdk.source.functions import locate

    project = locate(remote.torchrun_function)
    return gang_key(remote._resolved_compute(), project.function, project.root)


@pytest.mark.long
def test_deleted_pods_are_replaced(cluster: Path, user: ModuleType) -> None:
    remote = kt.fn(user.add).to(FAST)
    assert remote(1) == 2
    with changing_job(cluster) as job:
        job["status"] = {"phase": "Succeeded"}
    for path in (cluster / "pods").iterdir():
        path.unlink()
    assert remote(2) == 3
    assert asked(cluster).count("submit") == 2


def test_a_file_that_changes_during_the_upload_is_reported(
    cluster: Path, user: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    remote = kt.fn(user.add).to(FAST)
    assert remote(1) == 2
    (cluster / "refuse").write_text("files:the directory cannot be read")
    with pytest.raises(kt.ClusterError, match="cannot be read"):
        remote(2)


@pytest.mark.long
def test_timeouts(cluster: Path, user: ModuleType) -> None:
    with pytest.raises(kt.CallTimeout, match="did not return within 1 s"):
        kt.fn(user.sleeps).to(kt.Compute()).options(timeout=1)(600)
    assert "delete torchrunjob" in asked(cluster)
    (cluster / "slow").touch()
    with pytest.raises(kt.LaunchTimeout, match="Waiting: for a node"):
        kt.fn(user.sleeps).to(kt.Compute(launch_timeout=20))(1)


def test_a_job_that_is_deleted_during_a_call(cluster: Path, user: ModuleType) -> None:
    def delete() -> None:
        until(lambda: list((cluster / "pods").iterdir()))
        delete_job(cluster)

    threading.Thread(target=delete).start()
    with pytest.raises(kt.JobFailed, match="was deleted"):
        kt.fn(user.sleeps).to(kt.Compute())(600)


def test_pods_of_a_call_that_starts_are_deleted_later(cluster: Path, user: ModuleType) -> None:
    remote = kt.fn(user.add).to(FAST)
    (cluster / "hangs").touch()
    with ThreadPoolExecutor(1) as threads:
        first = threads.submit(remote, 1)
        until(lambda: (cluster / "commands").exists() and " submit " in asked(cluster))
        (cluster / "refuse").write_text("submit:no such queue")
        with pytest.raises(kt.ClusterError, match="no such queue"):
            remote(2)
        (cluster / "hangs").unlink()
        assert first.result(SECONDS) == 2
    remote.down()
    assert not (cluster / "job.json").exists()


def test_down_tries_to_delete_all_pods(cluster: Path, user: ModuleType) -> None:
    remote = kt.fn(user.add).to(FAST)
    for name in ("a-1", "b-1"):
        remote._gangs.append(Gang(name, FAST, cluster, print, created=True))
    (cluster / "refuse").write_text("delete torchrunjob a-1:no route")
    with pytest.raises(kt.ClusterError, match="no route"):
        remote.down()
    assert "delete torchrunjob b-1" in asked(cluster)
    (cluster / "refuse").unlink()
    remote.down()
    assert asked(cluster).count("delete torchrunjob b-1") == 1
    assert remote._gangs == []


def test_a_call_without_permission_to_watch_its_pods_ends(
    cluster: Path, user: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch, "_PAUSE", 0.01)
    (cluster / "refuse").write_text("get pods:(Forbidden) pods is forbidden")
    with pytest.raises(kt.ClusterError, match="pods is forbidden\nThe job was not changed"):
        kt.fn(user.sleeps).to(kt.Compute())(600)
    assert (cluster / "job.json").exists()


def test_deploy_and_reattach(cluster: Path, user: ModuleType) -> None:
    (cluster / "state").mkdir()
    name = kt.fn(user.sleeps).to(kt.Compute()).deploy(1)
    assert kt.attach(name, timeout=60) == "slept"
    replace_text(cluster / "job.json", '{"metadata": {"name": "other"}, "status": {}}')
    with pytest.raises(kt.ClusterError, match="was not created by this package"):
        kt.attach("other")


SCRIPT = """
import os, time
import torchrun_sdk as kt

def f(go):
    print("BEGUN", flush=True)
    while not os.path.exists(go): time.sleep(0.05)
    return "done"

if __name__ == "__main__":
    import sys
    kt.fn(f).to(kt.Compute())(sys.argv[1])
"""


@pytest.mark.long
def test_ctrl_c_detaches_and_prints_how_to_reattach(cluster: Path, tmp_path: Path) -> None:
    (cluster / "state").mkdir()
    script = tmp_path / "project" / "script.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(SCRIPT))
    sdk = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "sdk")}
    process = subprocess.Popen(
        [sys.executable, str(script), str(tmp_path / "go")], env=sdk, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.PIPE,
    )  # fmt: skip
    assert process.stdout is not None
    assert any("BEGUN" in line for line in iter(process.stdout.readline, ""))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    (tmp_path / "go").touch()
    job = json.loads((cluster / "job.json").read_text())["metadata"]["name"]
    assert f"kt results {job}" in err
    assert "ttlSecondsAfterFinished" in asked(cluster)
    assert kt.attach(job) == "done"


def test_ctrl_c_during_the_upload_deletes_the_job(cluster: Path, tmp_path: Path) -> None:
    """The job has no code, so it cannot continue."""
    (cluster / "hangs").touch()
    script = tmp_path / "project" / "script.py"
    script.parent.mkdir()
    script.write_text(textwrap.dedent(SCRIPT))
    sdk = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[4] / "sdk")}
    process = subprocess.Popen(
        [sys.executable, str(script), "x"], env=sdk, text=True, stderr=subprocess.PIPE
    )
    until(lambda: (cluster / "commands").exists() and " submit " in asked(cluster))
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    assert "delete torchrunjob" in asked(cluster)
    assert "KeyboardInterrupt" in err
    assert "Detached" not in err


def test_stored_results_decide_the_outcome_of_a_job(cluster: Path) -> None:
    folder = cluster / "state" / "sdk" / "c1"
    folder.mkdir(parents=True)
    (folder / "0.started").write_text(encode(Started(0, 2, "a", 1, 1.0)))
    (folder / "0.left").write_text(encode(Result(0, "a", pack(1, "json", "x"))))
    (folder / "1.started").write_text(encode(Started(1, 2, "b", 1, 1.0)))
    plain = Kubectl()
    succeeded, failed = {"phase": "Succeeded"}, {"phase": "Failed", "reason": "Error"}
    with pytest.raises(kt.JobFailed, match="1 of 2 results"):
        reattach.kept_results("j", plain, succeeded)
    (folder / "1.left").write_text(encode(Exited(1, "b", 2.0, 137, True)))
    with pytest.raises(kt.OutOfMemory, match="rank 1 on b was killed by signal 9"):
        reattach.kept_results("j", plain, failed)
    shutil.rmtree(cluster / "state")
    with pytest.raises(kt.JobFailed, match="has no files at"):
        reattach.kept_results("j", plain, succeeded)
    with pytest.raises(kt.JobFailed, match="Error"):
        reattach.kept_results("j", plain, failed)


def test_missing_programs_show_how_to_install_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    with pytest.raises(kt.ClusterError, match="pipx install"):
        Kubectl().plugin("files")
