"""Which pods a call uses, and what it opens."""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType

import pytest

import torchrun_sdk as kt
from torchrun_sdk.call import connections
from torchrun_sdk.call.gang import Gang
from torchrun_sdk.cluster import own_jobs
from torchrun_sdk.serialization import pack
from torchrun_sdk.spec import Result, read_call

from .call.test_gang import FAST, SCRIPT, asked, until, until_running, user  # noqa: F401  a fixture
from .pods import SECONDS
from .test_hostile import MARK, Bomb

pytestmark = pytest.mark.long  # processes


def test_pickle_calls_skip_warm_pods_that_a_json_call_has_borrowed(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    tmp_path: Path,
) -> None:
    kt.fn(user.add).to(FAST)(1)
    until_running(cluster)
    shutil.rmtree(tmp_path / "home")  # the job is now that of another user
    borrows = kt.fn(user.add).to(FAST)
    assert borrows(2) == 3
    assert asked(cluster).count("submit") == 1
    assert borrows.options(serialization="pickle")(3) == 4
    assert asked(cluster).count("submit") == 2


def test_a_pickle_of_borrowed_pods_is_not_opened(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    tmp_path: Path,
) -> None:
    theirs = Gang("theirs-1", FAST, cluster, print, created=True, uid="u9")
    opens = kt.fn(user.add).to(FAST).options(serialization="pickle")
    answer = Result(0, "a", pack(Bomb(tmp_path), "pickle", "x"))
    with pytest.raises(kt.UntrustedPickle, match="theirs-1"):
        opens._open_results([answer], theirs)
    assert not (tmp_path / MARK).exists()


def test_deployed_pods_keep_their_results_and_end(
    cluster: Path,
    user: ModuleType,  # noqa: F811
) -> None:
    """Without a state directory, as with direct delivery."""
    name = kt.fn(user.add).to(FAST).options(linger="5m").deploy(1)
    call = read_call(cluster / "workspace" / f"{name}-pod-0" / ".torchrun-sdk")
    assert (call.idle, call.linger) == (0, 300)
    assert "torchrun.ai/sdk-gang" not in (cluster / "job.json").read_text()
    assert kt.attach(name) == 2
    until(lambda: '"Succeeded"' in (cluster / "job.json").read_text())


def test_warm_pods_of_another_directory_are_not_used(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    tmp_path: Path,
) -> None:
    """A notebook may change its directory between two calls of a function."""
    remote = kt.fn(user.add).to(FAST)
    _, call = remote._prepare_call(FAST, [1], {})
    warm = Gang("add-1", FAST, tmp_path / "a", print, created=True)
    remote._gangs.append(warm)
    for directory, is_used in (("b", False), ("a", True)):
        taken = remote._take_gang(FAST, tmp_path / directory, call)
        assert (taken is warm) == is_used


def test_down_leaves_pods_of_other_programs_and_says_so(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A call of the other program may run in them."""
    remote = kt.fn(user.add).to(FAST)
    assert remote(1) == 2
    capsys.readouterr()
    kt.fn(user.add).to(FAST).down()
    assert (cluster / "job.json").exists()
    assert "add: this program has no warm pods" in capsys.readouterr().err
    remote.down()
    assert not (cluster / "job.json").exists()
    kt.fn(user.add).to(kt.Compute()).down()  # whose pods end with each call
    assert capsys.readouterr().err == ""


def test_options_extend_earlier_ones(
    cluster: Path,
    user: ModuleType,  # noqa: F811
) -> None:
    first = kt.fn(user.add).to(FAST).options(linger="5m", serialization="pickle", returns="head")
    name = first.options(timeout="1m").options(returns="all").deploy(1)
    call = read_call(cluster / "workspace" / f"{name}-pod-0" / ".torchrun-sdk")
    assert (call.linger, call.returns) == (300, "all")
    assert call.arguments.format == "pickle"


def test_a_second_ctrl_c_during_the_deletion_names_the_job(cluster: Path, tmp_path: Path) -> None:
    for name in ("hangs", "holds"):
        (cluster / name).touch()
    script = tmp_path / "project" / "script.py"
    script.parent.mkdir()
    script.write_text(SCRIPT)
    sdk = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[3] / "sdk")}
    process = subprocess.Popen(
        [sys.executable, str(script), "x"], env=sdk, text=True, stderr=subprocess.PIPE
    )
    for command in (" submit ", " delete "):
        until(lambda command=command: command in _commands(cluster))
        process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=SECONDS)
    (job,) = re.findall(r" delete torchrunjob (\S+)", asked(cluster))
    assert f"kt down {job}" in err
    assert "KeyboardInterrupt" in err


def test_ctrl_c_before_a_call_starts_in_warm_pods_leaves_them(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """A client that reattached would get the result of the previous call."""
    monkeypatch.setattr(connections, "_LAST_WORDS", 0.1)  # the connection waits for the files
    remote = kt.fn(user.add).to(FAST)
    assert remote(1) == 2
    (cluster / "lists").touch()
    before = asked(cluster).count(" exec ")
    with _ctrl_c(lambda: asked(cluster).count(" exec ") > before):
        _is_not_started(remote, capsys)
    with monkeypatch.context() as patched:  # before the connections
        patched.setattr(own_jobs, "record", lambda *_: signal.raise_signal(signal.SIGINT))
        _is_not_started(remote, capsys)
    (cluster / "lists").unlink()
    assert remote(3) == 4
    assert asked(cluster).count(" submit ") == 1


def test_ctrl_c_after_a_call_has_started_in_warm_pods_detaches(
    cluster: Path,
    user: ModuleType,  # noqa: F811
) -> None:
    remote = kt.fn(user.waits).to(FAST)
    assert remote(str(cluster)) == "waited"
    go = cluster / "go"
    starts = "workspace/*/.torchrun-sdk/results/*/0.started"
    with (
        _ctrl_c(lambda: len(list(cluster.glob(starts))) == 2),
        pytest.raises(KeyboardInterrupt) as raised,
    ):
        remote(str(go))
    go.touch()
    assert isinstance(raised.value, kt.Detached)
    assert kt.attach(raised.value.job) == "waited"


@contextmanager
def _ctrl_c(ready: Callable[[], object]) -> Iterator[None]:
    """Press Ctrl-C once when it is ready."""

    def press() -> None:
        until(ready)
        signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    thread = threading.Thread(target=press)
    thread.start()
    yield
    thread.join()


def _is_not_started(remote: kt.Remote, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyboardInterrupt) as raised:
        remote(2)
    output = capsys.readouterr().err
    assert not isinstance(raised.value, kt.Detached)
    assert "Detached" not in output
    assert "the call was not started; its pods stay" in output


def test_a_remote_function_gets_another_name_and_directory(
    cluster: Path,
    user: ModuleType,  # noqa: F811
    tmp_path: Path,
) -> None:
    (cluster / "slow").touch()
    remote = kt.fn(user.add).to(kt.Compute()).distribute(workers=2)
    assert kt.fn(remote) is remote
    name = kt.fn(kt.fn(remote, name="sweep"), directory=tmp_path).deploy(1)
    assert name.startswith("sweep-")
    assert f"--directory {tmp_path} " in asked(cluster)
    assert json.loads((cluster / "job.json").read_text())["spec"]["numNodes"] == 2
    assert remote.deploy(1).startswith("add-")


def _commands(cluster: Path) -> str:
    file = cluster / "commands"
    return file.read_text() if file.exists() else ""
