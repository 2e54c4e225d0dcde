"""Malicious pods: which data the client opens, reads and prints."""

import asyncio
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given
from hypothesis import strategies as st

import torchrun_sdk as kt
from torchrun_sdk import cli
from torchrun_sdk.call.log import CallLog
from torchrun_sdk.cluster import own_jobs
from torchrun_sdk.cluster.kubectl import Child, Kubectl
from torchrun_sdk.cluster.manifest import gang_key
from torchrun_sdk.cluster.watch import Watch
from torchrun_sdk.serialization import pack
from torchrun_sdk.source.functions import project
from torchrun_sdk.spec import FrameError, Lines, Raised, Reference, Result, Started, decode, encode

from .call.test_gang import FAST, asked, until, user  # noqa: F401  a fixture
from .pods import replace_text

MARK = "opened"


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __reduce__(self) -> tuple[Callable[..., None], tuple[Path]]:
        return (Path.touch, (self.folder / MARK,))


MODULE = """
import json, os, time
from pathlib import Path

def swaps(folder):
    from torchrun_sdk import serialization
    true = serialization.pack
    class Bomb:
        def __reduce__(self):
            return (Path.touch, (Path(folder, "opened"),))
    serialization.pack = lambda value, format, what: true(Bomb(), "pickle", what)

def pickles(): return {1, 2}
def ranks(): return int(os.environ["RANK"])
def mine():
    rank = int(os.environ["RANK"])
    return object() if rank else rank

def garbles(line):
    (results,) = Path(".torchrun-sdk", "results").iterdir()
    Path("line").write_text(line)
    Path("line").replace(results / "0.left")
    time.sleep(600)

def paints():
    print("\\x1b]0;owned\\x07\\x1b[2Jplain\\rlast", flush=True)
    while not any(b"last" in log.read_bytes() for log in Path(".torchrun-sdk").rglob("0.log")):
        time.sleep(0.01)  # the client of a call that fails does not wait for its output
    raise ValueError("\\x1b]52;c;AAAA\\x07")

def sleeps(mark):
    Path(mark).write_text(str(os.getpid()))
    time.sleep(600)
"""


@pytest.fixture
def theirs(user: ModuleType) -> ModuleType:  # noqa: F811
    Path(user.__file__).write_text(MODULE)
    exec(compile(MODULE, user.__file__, "exec"), user.__dict__)
    return user


@pytest.fixture
def keep(cluster: Path) -> Callable[..., None]:
    """Store a finished job with the result of its only rank."""

    def keep(value: object, format: str, label: str = "function") -> None:
        folder = cluster / "state" / "sdk" / "c1"
        folder.mkdir(parents=True)
        (folder / "0.started").write_text(encode(Started(0, 1, "a", 1, 1.0)))
        (folder / "0.left").write_text(encode(Result(0, "a", pack(value, format, "x"))))
        metadata = {"name": "j", "uid": "u1", "labels": {"torchrun.ai/sdk": label}}
        body = {"metadata": metadata, "status": {"phase": "Succeeded"}}
        replace_text(cluster / "job.json", json.dumps(body))

    return keep


@pytest.mark.long
def test_a_pickle_in_place_of_json_is_not_loaded(theirs: ModuleType, tmp_path: Path) -> None:
    with pytest.raises(
        kt.UntrustedPickle, match="'pickle', but this call accepts only json"
    ) as refused:
        kt.fn(theirs.swaps).to(kt.Compute())(str(tmp_path))
    assert refused.value.job.startswith("swaps-")
    assert not (tmp_path / MARK).exists()


@pytest.mark.long
def test_a_pickle_of_another_users_job_needs_a_confirmation(
    keep: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(Bomb(tmp_path), "pickle")
    with pytest.raises(kt.UntrustedPickle, match="kt results --trust j"):
        kt.attach("j")
    assert cli.main(["results", "j"]) == 2
    assert not (tmp_path / MARK).exists()
    assert cli.main(["results", "--trust", "j"]) == 0
    assert (tmp_path / MARK).exists()


@pytest.mark.long
def test_own_jobs_are_recognised_by_uid_and_call(
    keep: Callable[..., None],
) -> None:
    keep({1, 2}, "pickle")
    for uid, serialization in (("u2", "pickle"), ("u1", "json")):
        own_jobs.record(uid, serialization)
        with pytest.raises(kt.UntrustedPickle):
            kt.attach("j")
    own_jobs.record("u1", "pickle")
    assert kt.attach("j") == {1, 2}
    own_jobs.record("u1", "json")  # another call in the same job
    assert kt.attach("j") == {1, 2}


@pytest.mark.long
def test_own_pickles_need_no_confirmation(cluster: Path, theirs: ModuleType) -> None:
    (cluster / "state").mkdir()
    remote = kt.fn(theirs.pickles).to(kt.Compute()).options(serialization="pickle")
    assert remote() == {1, 2}
    job = json.loads((cluster / "job.json").read_text())["metadata"]["name"]
    assert kt.attach(job) == {1, 2}


def test_a_read_only_home_directory_only_asks(
    keep: Callable[..., None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    own_jobs.record("u1", "pickle")
    assert own_jobs.accepted("u1") == ("json",)


def test_a_file_that_disappears_does_not_prevent_the_record(tmp_path: Path, cluster: Path) -> None:
    own_jobs.record("u1", "pickle")
    (folder,) = (tmp_path / "home").glob("*/jobs")
    (folder / "temporary.1").symlink_to(folder / "gone")
    own_jobs.record("u2", "pickle")
    assert own_jobs.is_own("u2")


def test_a_user_without_a_name_or_a_home(
    cluster: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def unknown(*_: object) -> None:
        raise RuntimeError("Could not determine home directory.")

    def unnamed() -> None:
        raise KeyError("getpwuid(): uid not found: 1000800000")

    monkeypatch.delenv("XDG_STATE_HOME")
    monkeypatch.setattr(Path, "home", unknown)
    monkeypatch.setattr("getpass.getuser", unnamed)
    own_jobs.record("u1", "pickle")
    assert not own_jobs.is_own("u1")
    (tmp_path / ".git").mkdir()
    (tmp_path / "pkg").mkdir()
    assert project(tmp_path / "pkg") == tmp_path
    assert gang_key(kt.Compute(), Reference("f"), tmp_path)


@pytest.mark.long
def test_warm_pods_of_another_owner_get_no_pickles(cluster: Path, theirs: ModuleType) -> None:
    remote = kt.fn(theirs.pickles).to(FAST)
    labels = {"torchrun.ai/sdk-gang": "k"}
    metadata = {"name": "theirs", "uid": "u9", "labels": labels}
    body = {"metadata": metadata, "status": {"phase": "Running"}}
    replace_text(cluster / "job.json", json.dumps(body))
    opens = remote.options(serialization="pickle")
    assert kt.fn(theirs.ranks).to(FAST)._find_warm_job(FAST, "k") == ("theirs", "u9")
    assert opens._find_warm_job(FAST, "k") == ("", "")
    own_jobs.record("u9", "json")
    assert opens._find_warm_job(FAST, "k") == ("theirs", "u9")


@pytest.mark.long
def test_only_the_result_of_the_head_is_sent(cluster: Path, theirs: ModuleType) -> None:
    (cluster / "state").mkdir()
    remote = kt.fn(theirs.mine).to(kt.Compute()).distribute(workers=2).options(returns="head")
    assert remote() == 0  # the result of rank 1 is no JSON, but it is not requested
    left = sorted((cluster / "state" / "sdk").glob("*/*.left"))
    assert [json.loads(path.read_text())["value"]["data"] for path in left] == ["0", "null"]
    job = json.loads((cluster / "job.json").read_text())["metadata"]["name"]
    assert kt.attach(job) == 0


def test_fields_of_newer_versions_are_ignored() -> None:
    word = Raised(0, "n", 1.0, "builtins.ValueError", "bad", "")
    body = json.loads(encode(word))
    assert decode(json.dumps({**body, "seconds": 1.0})) == word
    assert decode('{"kind": "News", "rank": 1}') is None


WORDS = [
    Started(0, 1, "n", 1, 1.0), Result(0, "n", pack(1, "json", "x")), Lines(0, 1, ["a"]),
    Raised(0, "n", 1.0, "t", "x", ""),
]  # fmt: skip
anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text(max_size=3), inner),
)


@given(st.sampled_from(WORDS), st.data())
def test_a_frame_is_complete_or_refused(word: Started | Result, data: st.DataObject) -> None:
    body = json.loads(encode(word))
    name = data.draw(st.sampled_from(sorted(body)))
    if data.draw(st.booleans()):
        del body[name]
    else:
        body[name] = data.draw(anything)
    try:
        found = decode(json.dumps(body))
    except FrameError:
        return
    if found is not None:
        assert decode(encode(found)) == found


@pytest.mark.long
@pytest.mark.parametrize(
    "line", ['{"kind": "Result", "rank": 0}', '{"kind": "Raised", "rank": "0"}', '{"kind"']
)
def test_an_unreadable_frame_ends_the_call(cluster: Path, theirs: ModuleType, line: str) -> None:
    with pytest.raises(kt.ProtocolError, match=r"cannot decode a message of pod .*pod-0") as error:
        kt.fn(theirs.garbles).to(kt.Compute())(line)
    assert error.value.job.startswith("garbles-")
    assert (cluster / "job.json").exists()  # another version may read it


@pytest.mark.long
def test_unreadable_stored_results_are_reported(cluster: Path, keep: Callable[..., None]) -> None:
    keep(1, "json")
    (cluster / "state" / "sdk" / "c1" / "0.left").write_text('{"kind": "Result", "rank": 0}')
    with pytest.raises(kt.ProtocolError, match="kubectl torchrun state-files j sdk"):
        kt.attach("j")


@pytest.mark.long
def test_cut_and_binary_lines_do_not_stop_the_reader() -> None:
    heard: list[str] = []
    program = r"import os; os.write(1, b'\xff\n{}\n{\"kind\"')"
    child = Child([sys.executable, "-c", program], heard.append, whole=True)
    assert child.wait(60)
    child.close()
    assert heard == ["\ufffd", "{}"]


@pytest.mark.long
def test_a_watch_reports_changes_only(cluster: Path, tmp_path: Path) -> None:
    gone = {"kind": "Status", "status": "Failure", "code": 410}
    job = {"metadata": {"name": "j"}, "status": {}}
    events = [{"type": "ERROR", "object": gone}, {"type": "ADDED", "object": None}, 5, "",
              {"type": "MODIFIED", "object": job}]  # fmt: skip
    lines = "\n".join(["no JSON", *map(json.dumps, events), '{"type": "ADDED", "ob'])
    (tmp_path / "events").write_text(lines)
    (tmp_path / "bin" / "kubectl").write_text(f"#!/bin/sh\ncat {tmp_path}/events\n")
    heard: list[tuple[str, object]] = []
    watch = Watch(Kubectl(), ["torchrunjob", "j"], lambda *change: heard.append(change))
    until(lambda: heard)
    watch.close()
    assert heard[0] == ("MODIFIED", job)


@pytest.mark.long
@pytest.mark.parametrize(
    ("owner", "attempt", "index"),
    [
        ("", "0", "0"),
        ("", "0", "7"),
        ("Job/ranks-xxxxx", "first", "0"),
        ("Job/ranks-xxxxx", "0", "last"),
        ("Job/copy", "0", "0"),
        ("Job/ranks-xxxxx-r1", "0", "0"),
        ("Job/ranks-xxxxx-w", "0", "0"),
        ("ReplicaSet/ranks-xxxxx", "0", "0"),
    ],
)
def test_a_pod_of_another_owner_is_no_rank(
    cluster: Path,
    theirs: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    owner: str,
    attempt: str,
    index: str,
) -> None:
    """It may have the labels of a worker, as a copy of the Job under another name gives them."""
    monkeypatch.setattr("torchrun_sdk.cluster.manifest.secrets.choice", lambda _: "x")
    workspace = cluster / "workspace" / "stranger" / ".torchrun-sdk"
    workspace.mkdir(parents=True)
    (workspace / "run.py").write_text('print(\'{"kind": "Raised"}\', flush=True)')
    labels = {"torchrun.ai/attempt": attempt, "batch.kubernetes.io/job-completion-index": index}
    kind, _, name = owner.partition("/")
    owners = [{"kind": kind, "name": name, "controller": True}] if owner else []
    metadata = {"name": "stranger", "labels": labels, "ownerReferences": owners}
    stranger = {"metadata": metadata, "status": {"phase": "Running"}}
    replace_text(cluster / "pods" / "stranger.json", json.dumps(stranger))
    assert kt.fn(theirs.ranks).to(kt.Compute())() == 0


@pytest.mark.long
def test_output_of_pods_is_escaped_on_a_terminal(
    theirs: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(kt.RemoteException) as raised:
        kt.fn(theirs.paints).to(FAST)()
    assert "\x1b" not in str(raised.value)
    assert r"\u001b]52;c;AAAA\u0007" in str(raised.value)
    output = capsys.readouterr()
    assert "\x1b" not in output.out + output.err
    assert "last\n" in output.out


@given(st.text())
def test_a_line_of_a_log_is_one_line_without_control_characters(text: str) -> None:
    shown: list[str] = []
    CallLog(shown.append, several=True).take(0, "0", Lines(0, 0, [text]))
    assert not any(ord(mark) < 32 and mark not in "\t\n" for line in shown for mark in line)


@pytest.mark.long
async def test_a_cancelled_call_deletes_its_job(
    cluster: Path, theirs: ModuleType, tmp_path: Path
) -> None:
    mark = tmp_path / "runs"
    task = asyncio.create_task(kt.fn(theirs.sleeps).to(kt.Compute()).acall(str(mark)))
    await asyncio.to_thread(until, mark.exists)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert not (cluster / "job.json").exists()


@pytest.mark.long
async def test_a_cancelled_upload_ends(cluster: Path, theirs: ModuleType, tmp_path: Path) -> None:
    (cluster / "hangs").touch()
    task = asyncio.create_task(kt.fn(theirs.sleeps).to(kt.Compute()).acall("x"))
    commands = cluster / "commands"
    await asyncio.to_thread(until, lambda: commands.exists() and "submit" in commands.read_text())
    began = time.monotonic()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert time.monotonic() - began < 60
    assert "delete torchrunjob" in asked(cluster)


@pytest.mark.long
async def test_warm_pods_outlive_a_cancelled_call(
    cluster: Path, theirs: ModuleType, tmp_path: Path
) -> None:
    mark = tmp_path / "runs"
    remote = kt.fn(theirs.sleeps).to(FAST)
    other = kt.fn(theirs.ranks).to(FAST)
    assert await other.acall() == 0
    remote._gangs = other._gangs
    task = asyncio.create_task(remote.acall(str(mark)))
    await asyncio.to_thread(until, lambda: mark.exists() and mark.read_text())
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    process = Path("/proc", mark.read_text())
    await asyncio.to_thread(until, lambda: not process.exists())
    assert await other.acall() == 0
    assert asked(cluster).count("submit") == 1


@pytest.mark.long
def test_exit_codes_of_kt(cluster: Path, keep: Callable[..., None]) -> None:
    keep(1, "json")
    assert cli.main(["list"]) == 0
    (cluster / "refuse").write_text("get torchrunjob:Forbidden\ndelete:Forbidden")
    assert cli.main(["results", "j"]) == 4
    assert cli.main(["list"]) == 4
    assert cli.main(["down", "j"]) == 4
    assert cli.main(["run"]) == 2
    assert cli.main(["run", "no-such-program"]) == 2
    assert cli.main(["deploy", "no-such.py"]) == 2


@pytest.mark.long
def test_every_result_is_printed(
    keep: Callable[..., None], capsys: pytest.CaptureFixture[str]
) -> None:
    keep({(1, 2): "x"}, "pickle")
    assert cli.main(["results", "--trust", "j"]) == 0
    assert json.loads(capsys.readouterr().out) == "{(1, 2): 'x'}"


def test_ctrl_c_ends_kt_without_a_traceback(cluster: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(Kubectl, "run", interrupted)
    assert cli.main(["results", "j"]) == 130
