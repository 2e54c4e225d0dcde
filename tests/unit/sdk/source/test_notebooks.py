"""Functions from the prompts of real interpreters, called in a pod."""

import json
import os
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchrun_sdk.serialization import FORMATS, Packed, here, pack, unpack
from torchrun_sdk.spec import Raised, Reference, Result

from ..pods import SECONDS, frames

pytestmark = pytest.mark.long  # processes

SDK = str(Path(__file__).parents[4] / "sdk")
# Like IPython and Jupyter: cells are in linecache, under a name that is no file.
NOTEBOOK = """
import ast, code, linecache, sys

class Notebook(code.InteractiveInterpreter):
    def cell(self, number, text):
        name = f"/tmp/ipykernel_1/{number}.py"
        linecache.cache[name] = (len(text), None, text.splitlines(True), name)
        exec(compile(text, name, "exec"), sys.modules["__main__"].__dict__)

for number, text in enumerate(sys.stdin.read().split("# %%\\n")):
    Notebook().cell(number, text)
"""
SHOW = """
import json as _json
from torchrun_sdk.source.functions import locate as _locate
_found = _locate(getattr(f, "torchrun_function", f))
print("FOUND", _json.dumps(_found.function._asdict()))
"""


def notebook(directory: Path) -> list[str]:
    """The command that runs cells. Python 3.13 would store the source of code given by -c."""
    (directory / "notebook.py").write_text(NOTEBOOK)
    return [sys.executable, "notebook.py"]


def typed(directory: Path, command: list[str], text: str) -> Reference:
    """`f` of the last cell, located in a session of this interpreter."""
    return read_reference(in_session(directory, command, text))


def in_session(directory: Path, command: list[str], text: str) -> str:
    """The output of a session of this interpreter."""
    ended = subprocess.run(
        [*command], cwd=directory, input=text, capture_output=True, text=True, timeout=SECONDS,
        env={**os.environ, "PYTHONPATH": SDK},
    )  # fmt: skip
    assert "FOUND {" in ended.stdout, ended.stdout + ended.stderr
    return ended.stdout


def read_reference(output: str) -> Reference:
    line = next(line for line in output.splitlines() if "FOUND {" in line)
    return Reference(**json.loads(line.partition("FOUND ")[2]))


CELLS = """
import math
import torchrun_sdk as kt
from collections import Counter
RATE = 0.5
# %%
class Point:
    def __init__(self, x):
        self.x = x

def half(n):
    return Point(n * RATE)
# %%
@kt.compute()
def f(n):
    if n < 0:
        raise ValueError("below 0")
    return [half(n).x, math.floor(2.5), Counter("aab")["a"]]
# %%
"""


def test_a_cell_is_sent_with_its_dependencies(make, tmp_path: Path) -> None:
    output = typed(tmp_path, notebook(tmp_path), CELLS + SHOW)
    pod = make("", "f", 4, function=output)
    rank, collector = pod.rank(), pod.collect()
    assert unpack(frames(collector, Result)[-1].value) == [2.0, 2, 2]
    collector.stdin.close()
    assert (rank.wait(SECONDS), collector.wait(SECONDS)) == (0, 0)
    shutil.rmtree(tmp_path / ".torchrun-sdk")
    again = make("", "f", -1, function=output)
    again.rank()
    raised = frames(again.collect(), Raised)[-1]
    assert 'raise ValueError("below 0")' in raised.traceback


def run_in_pod(make, reference: Reference, arguments: Packed) -> object:
    pod = make("", "f", function=reference, arguments=arguments)
    pod.rank()
    return unpack(frames(pod.collect(), Result)[-1].value, FORMATS)


def test_aliases_are_sent(make, tmp_path: Path) -> None:
    cells = """
def base(n): return n + 1
class Net: size = 3
step, Model, small = base, Net, lambda n: n
def f(n): return step(n) + Model.size
# %%
"""
    reference = typed(tmp_path, notebook(tmp_path), cells + SHOW)
    assert run_in_pod(make, reference, pack([(1,), {}], "json", "x")) == 5


def test_the_classes_of_a_pickled_argument_are_sent(make, tmp_path: Path) -> None:
    cells = """
from torchrun_sdk.serialization import pack as _pack
class Base: pass
class Config(Base):
    class Inner:
        rate = 2
    def __init__(self): self.inner = self.Inner()
def scale(n): return n * 3
def f(config, by): return by["scale"](config.inner.rate)
# %%
_arguments = ((Config(),), {"by": {"scale": scale}})
print("PACKED", _pack([*_arguments], "pickle", "x").data)
# %%
"""
    show = SHOW.replace("f))", "f), values=_arguments)")
    ended = in_session(tmp_path, notebook(tmp_path), cells + show)
    data = ended.partition("PACKED ")[2].split()[0]
    assert run_in_pod(make, read_reference(ended), Packed("pickle", here(), data)) == 6


@pytest.mark.parametrize(
    ("cells", "message"),
    [
        ("opened = open('/dev/null')\n# %%\ndef f(): return opened.name\n# %%\n",
         "f uses opened of this session, a TextIOWrapper"),
        ("def g(): ...\nold = g\ndef g(): ...\ndef f(): return old(), g()\n# %%\n",
         "f uses old of this session, a function that"),
        ("def g(): ...\ncached = __import__('functools').lru_cache(g)\ndef f(): cached()\n# %%\n",
         "f uses cached of this session, a _lru_cache_wrapper that"),
        ("exec('def g(): ...')\ndef f(): return g()\n# %%\n", "The source of g is not available"),
    ],
)  # fmt: skip
def test_unsupported_names_are_reported(tmp_path: Path, cells: str, message: str) -> None:
    ended = subprocess.run(
        notebook(tmp_path), cwd=tmp_path, input=cells + SHOW,
        capture_output=True, text=True, env={**os.environ, "PYTHONPATH": SDK},
    )  # fmt: skip
    assert message in ended.stderr


PROMPT = "import math\ndef f(n):\n    return math.floor(n)\n\n" + textwrap.dedent(SHOW) + "\n"


def test_a_prompt_without_sources_has_a_remedy(tmp_path: Path) -> None:
    """`python -i` of a Python before 3.13, or without a terminal."""
    ended = subprocess.run(
        [sys.executable, "-i"], cwd=tmp_path, input=PROMPT, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": SDK},
    )  # fmt: skip
    assert "Save it as a module" in ended.stderr or "FOUND {" in ended.stdout


def test_ipython(make, tmp_path: Path) -> None:
    pytest.importorskip("IPython")
    command = [sys.executable, "-m", "IPython", "--simple-prompt", "--no-banner", "--quick"]
    text = "import math\ndef f(n):\n    return math.floor(n)\n\n" + textwrap.dedent(SHOW)
    output = typed(tmp_path, command, text + "\nexit\n")
    pod = make("", "f", 2.5, function=output)
    pod.rank()
    assert unpack(frames(pod.collect(), Result)[-1].value) == 2


def test_helpers_of_a_module_keep_their_wrappers(tmp_path: Path) -> None:
    (tmp_path / "lib.py").write_text(
        "import functools\n"
        "def load(n): return n\n"
        "def twice(function):\n"
        "    @functools.wraps(function)\n"
        "    def inner(n): return 2 * function(n)\n"
        "    return inner\n"
        "load_twice, cached = twice(load), functools.lru_cache(load)\n"
    )
    text = "from lib import load_twice, cached, load\ndef f(n): return load_twice(n), cached(n), load(n)\n"
    found = typed(tmp_path, notebook(tmp_path), f"{text}# %%\n{SHOW}")
    space: dict = {}
    sys.path.insert(0, str(tmp_path))
    try:
        exec(found.cell, space)
    finally:
        sys.path.remove(str(tmp_path))
    assert space["f"](1) == (2, 1, 1)


def test_a_wrapper_that_no_definition_has_is_refused(tmp_path: Path) -> None:
    text = (
        "import functools\n"
        "def twice(function):\n"
        "    @functools.wraps(function)\n"
        "    def inner(n): return 2 * function(n)\n"
        "    return inner\n"
        "def f(n): return n\n"
        "f = twice(f)\n"
    )
    refused = f"try:\n{textwrap.indent(SHOW.strip(), '    ')}\nexcept Exception as e: print('FOUND {{', e)\n"
    out = in_session(tmp_path, notebook(tmp_path), f"{text}# %%\n{refused}")
    assert "f is wrapped outside of its definition" in out
