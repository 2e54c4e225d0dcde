"""Ranks as separate processes, like in pods, and the client that collects their results."""

import json
from pathlib import Path

import pytest

from torchrun_sdk.serialization import pack, unpack
from torchrun_sdk.spec import FOLDER, RAISED, Raised, Reference, Result, decode
from torchrun_sdk.worker.call_files import RankFiles

from ..pods import SECONDS, frames

pytestmark = pytest.mark.long  # processes


def test_a_result_waits_until_it_is_collected(make) -> None:
    pod = make("def f(a):\n    print('hello')\n    return a + 1", "f", 41)
    rank = pod.rank()
    began, returned = frames(pod.collect(), Result)
    assert (began.rank, began.world_size) == (0, 1)
    assert unpack(returned.value) == 42
    out, err = rank.communicate(timeout=SECONDS)
    assert (rank.returncode, out) == (0, "hello\n"), err


def test_a_broken_connection_loses_nothing(make) -> None:
    pod = make("def f(): return 1")
    rank = pod.rank()
    first = pod.collect()
    assert first.stdout is not None
    while not isinstance(decode(first.stdout.readline()), Result):
        pass
    first.kill()  # before the acknowledgement
    assert rank.poll() is None
    assert isinstance(frames(pod.collect(), Result)[-1], Result)
    assert rank.wait(SECONDS) == 0


def test_an_exception_has_its_traceback_without_our_frames(make) -> None:
    pod = make("def f():\n    return g()\ndef g():\n    raise KeyError('lr')")
    rank = pod.rank(3, 4)
    raised = frames(pod.collect(), Raised)[-1]
    assert (raised.rank, raised.type, raised.text) == (3, "builtins.KeyError", "'lr'")
    assert "return g()" in raised.traceback
    assert "torchrun_sdk" not in raised.traceback
    assert rank.wait(SECONDS) == RAISED


@pytest.mark.parametrize(
    ("body", "text"),
    [
        ("return {1}", "Cannot serialize the result of rank 0 as json"),
        ("import sys; sys.exit(3)", "3"),
        ("raise SyntaxError('late')", "late"),
    ],
)
def test_other_ends_are_reported(make, body: str, text: str) -> None:
    pod = make(f"def f():\n    {body}")
    pod.rank()
    assert text in frames(pod.collect(), Raised)[-1].text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("def __str__(self): return None", "<__str__ failed: TypeError>"),
        ("def __str__(self): raise SystemExit", "<__str__ failed: SystemExit>"),
        ("__cause__ = property(lambda self: 1 / 0)", "bad"),
    ],
)
def test_an_exception_that_cannot_be_printed_is_reported(make, text: str, shown: str) -> None:
    script = f"""
    class Bad(Exception):
        {text}

    def f(): raise Bad("bad")
    """
    pod = make(script)
    rank = pod.rank()
    raised = frames(pod.collect(), Raised)[-1]
    assert (raised.type, raised.text) == ("__main__.Bad", shown)
    assert rank.wait(SECONDS) == RAISED


@pytest.mark.parametrize(
    ("script", "text"),
    [("def f(:", "invalid syntax"), ("1/0", "division"), ("x = 1", "no function f")],
)
def test_a_failed_import_is_reported(make, script: str, text: str) -> None:
    pod = make(script)
    pod.rank()
    assert text in frames(pod.collect(), Raised)[-1].text


UNGUARDED = """
import torchrun_sdk as kt

def first():
    return helper()

def helper():
    return "one"

"""
END = "\nraise AssertionError('the import goes no further')"


STARTS = [
    "one = kt.fn(first).to(kt.Compute())()",
    "kt.fn(first).to(kt.Compute()).deploy()",
    "kt.App('a', 'true').deploy()",
    "kt.App('a', 'true').run()",
    "kt.attach('first-x7k2p')",
]


@pytest.mark.parametrize("start", STARTS)
def test_an_unguarded_call_creates_no_second_job(make, start: str) -> None:
    pod = make(UNGUARDED + start + END, "first")
    pod.rank()
    assert unpack(frames(pod.collect(), Result)[-1].value) == "one"


@pytest.mark.parametrize("start", STARTS)
def test_an_unguarded_call_before_the_function_has_a_remedy(make, start: str) -> None:
    pod = make(UNGUARDED + start + END, "second")
    pod.rank()
    raised = frames(pod.collect(), Raised)[-1]
    assert raised.type == "torchrun_sdk.errors.UsageError"
    assert 'before second is defined. Move this below if __name__ == "__main__"' in raised.text


def test_an_unguarded_call_of_another_module_ends_the_import(make, tmp_path: Path) -> None:
    (tmp_path / "other.py").write_text("def g(): ...")
    start = "import other; kt.fn(other.g).to(kt.Compute())()"
    pod = make(UNGUARDED + start + END, "first")
    pod.rank()
    assert unpack(frames(pod.collect(), Result)[-1].value) == "one"


@pytest.mark.parametrize(
    ("start", "message"),
    [
        ("kt.fn(first).to(kt.Compute())()", r"cannot call first remotely. Use first.local()"),
        ("kt.fn(first).to(kt.Compute()).deploy()", r"cannot deploy first remotely"),
        ("kt.App('a', 'true').deploy()", r"cannot start the app a"),
        ("kt.attach('first-x7k2p')", r"cannot attach to job first-x7k2p"),
    ],
)
def test_a_call_within_a_call_is_refused(make, start: str, message: str) -> None:
    pod = make(f"{UNGUARDED}\ndef f(): {start}")
    pod.rank()
    assert message in frames(pod.collect(), Raised)[-1].text


def test_a_decorated_function_is_called_itself(make) -> None:
    script = """
    import functools
    import torchrun_sdk as kt

    def doubled(function):
        @functools.wraps(function)
        def wrapper(*args):
            return 2 * function(*args)
        return wrapper

    @kt.compute(gpus=8)
    @kt.distribute("pytorch", workers=2)
    @doubled
    def f(a):
        return a
    """
    pod = make(script, "f", 4)
    pod.rank()
    assert unpack(frames(pod.collect(), Result)[-1].value) == 8


def test_classes_of_the_script_are_pickled(make) -> None:
    script = """
    class Point:
        def __init__(self, x): self.x = x

    def f(): return [Point(3).x, Point.__module__]
    """
    pod = make(script, arguments=pack([(), {}], "pickle", "x"))
    pod.rank()
    assert unpack(frames(pod.collect(), Result)[-1].value, ["pickle"])[0] == 3


def test_the_main_block_does_not_run_in_pods(make) -> None:
    pod = make("def f(): return __name__\nif __name__ == '__main__':\n    raise SystemExit(5)")
    pod.rank()
    assert unpack(frames(pod.collect(), Result)[-1].value) == "__torchrun_script__"


@pytest.mark.parametrize("module", ["", "script"])
@pytest.mark.parametrize("method", ["spawn", "forkserver"])
def test_processes_of_multiprocessing_import_no_second_rank(make, method: str, module: str) -> None:
    script = """
    import multiprocessing

    def square(x): return x * x

    def f(method):
        with multiprocessing.get_context(method).Pool(1) as pool:
            return pool.map(square, [3, 4])
    """
    function = Reference("f", module=module) if module else Reference("f", script="script.py")
    pod = make(script, "f", method, function=function)
    pod.rank()
    assert unpack(frames(pod.collect(), Result)[-1].value) == [9, 16]


def test_a_disconnected_client_ends_its_collector(make) -> None:
    pod = make("def f(): return 1")
    collector = pod.collect()
    assert collector.stdin is not None
    collector.stdin.close()
    assert collector.wait(SECONDS) == 0


def test_the_call_file_is_plain_json(make, tmp_path: Path) -> None:
    make("def f(): ...", "f", 1, 2)
    body = json.loads((tmp_path / FOLDER / "call.json").read_text())
    assert body["function"]["script"] == "script.py"
    assert json.loads(body["arguments"]["data"]) == [[1, 2], {}]


def test_temporary_files_are_hidden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """`kubectl torchrun state-files` skips hidden files."""
    renamed: list[Path] = []
    replace = Path.replace

    def recorded(self: Path, target: Path) -> Path:
        renamed.append(self)
        return replace(self, target)

    monkeypatch.setattr(Path, "replace", recorded)
    monkeypatch.setenv("TORCHRUN_STATE_DIR", str(tmp_path / "state"))
    RankFiles(tmp_path / "c1", 0).write_outcome("{}")
    assert len(renamed) == 2
    assert all(path.name.startswith(".0.left.") for path in renamed)
