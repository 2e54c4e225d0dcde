"""How functions are located in pods."""

import importlib
import json
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from torchrun_sdk.errors import UsageError
from torchrun_sdk.source.functions import locate, project
from torchrun_sdk.worker.rank import find

ROOT = Path(__file__).parents[4]
SAYS = """
import json, sys
from torchrun_sdk.source.functions import locate
def says(function):
    found = locate(function)
    print(json.dumps([str(found.root), found.function._asdict()]))
"""


def located(directory: Path, *arguments: str) -> tuple[Path, dict]:
    """Locate the function of a script in a separate process."""
    (directory / "says.py").write_text(SAYS)
    ended = subprocess.run(
        [sys.executable, *arguments],
        cwd=directory, env={"PYTHONPATH": f"{ROOT / 'sdk'}:{directory}"},
        capture_output=True, text=True,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stderr
    root, function = json.loads(ended.stdout)
    return Path(root), function


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(textwrap.dedent(text))


@pytest.mark.long
def test_a_function_of_the_script_is_named_by_its_path(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "")
    write(tmp_path / "jobs/run.py", "from says import says\ndef f(): ...\nsays(f)")
    root, function = located(tmp_path, "jobs/run.py")
    assert root == tmp_path
    assert (function["qualname"], function["script"], function["module"]) == (
        "f",
        "jobs/run.py",
        "",
    )


@pytest.mark.long
def test_a_function_of_a_module_is_named_by_its_module(tmp_path: Path) -> None:
    write(tmp_path / "pyproject.toml", "")
    write(tmp_path / "src/pkg/__init__.py", "")
    write(tmp_path / "src/pkg/train.py", "class Trainer:\n    @staticmethod\n    def f(): ...")
    write(
        tmp_path / "run.py",
        """
        import sys
        sys.path.insert(0, "src")
        from pkg.train import Trainer
        from says import says
        says(Trainer.f)
        """,
    )
    root, function = located(tmp_path, "run.py")
    assert root == tmp_path
    assert (function["qualname"], function["module"]) == ("Trainer.f", "pkg.train")
    assert function["path"][0] == "src"


IN_POD = """
import json, sys
from pathlib import Path
from torchrun_sdk.spec import Reference
from torchrun_sdk.worker.rank import find
function = find(Reference(**json.loads(sys.argv[1])), Path(sys.argv[2]))
print(function(), function.__globals__["Config"] is sys.modules["__main__"].Config)
"""


@pytest.mark.long
@pytest.mark.parametrize("module", ["train", "__main__"])
def test_a_script_that_is_run_as_a_module_may_import_its_package(
    tmp_path: Path, module: str
) -> None:
    """Its directory is not on sys.path, in which `types` would be that of the package."""
    write(tmp_path / "pyproject.toml", "")
    write(tmp_path / "src/pkg/__init__.py", "")
    write(tmp_path / "src/pkg/types.py", "X = 1")
    write(
        tmp_path / f"src/pkg/{module}.py",
        """
        import types
        from .types import X
        class Config: ...
        def f():
            return X, types.ModuleType.__name__
        if __name__ == "__main__":
            from says import says
            says(f)
        """,
    )
    (tmp_path / "src" / "says.py").write_text(SAYS)
    name = "pkg" if module == "__main__" else f"pkg.{module}"
    root, function = located(tmp_path / "src", "-m", name)
    assert root == tmp_path
    assert function["script"] == f"src/pkg/{module}.py"
    pod = subprocess.run(
        [sys.executable, "-c", IN_POD, json.dumps(function), str(root)],
        cwd=tmp_path, env={"PYTHONPATH": f"{ROOT / 'sdk'}"}, capture_output=True, text=True,
    )  # fmt: skip
    assert pod.stdout == "(1, 'module') True\n", pod.stderr


def test_without_a_marker_the_directory_of_the_script_is_the_project(tmp_path: Path) -> None:
    assert project(tmp_path) == tmp_path
    write(tmp_path / "setup.py", "")
    (tmp_path / "deep" / "down").mkdir(parents=True)
    assert project(tmp_path / "deep" / "down") == tmp_path


def test_functions_that_cannot_be_imported_are_refused() -> None:
    def inner() -> None: ...

    for function, why in (
        (lambda: 0, "a lambda"),
        (inner, "inner"),
        (len, "not defined in a file"),
    ):
        with pytest.raises(UsageError, match=why):
            locate(function)


class Trainer:
    """Its objects exist on the client only."""

    def train(self) -> None: ...

    @classmethod
    def make(cls) -> None: ...


def test_a_method_of_an_object_is_refused() -> None:
    with pytest.raises(UsageError, match=r"Trainer.train is a method of an object, which is not"):
        locate(Trainer().train)
    assert locate(Trainer.make).function.qualname == "Trainer.make"


def test_a_file_outside_the_project_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="Pass directory="):
        locate(write, tmp_path)


WRAPPED = """
import functools
def seeded(seed):
    def decorate(function):
        @functools.wraps(function)
        def inner(*a):
            return seed, function(*a)
        return inner
    return decorate
def train(x): return x
with_seed = seeded(42)(train)
cached = functools.lru_cache(train)
@seeded(1)
def decorated(x): return x
@functools.lru_cache
def lru(x): return x
class A:
    @classmethod
    def run(cls, x): return cls.__name__, x
    @staticmethod
    def static(x): return x
class B(A):
    pass
class C(A):
    @classmethod
    def run(cls, x): return cls.__name__, x
replaced = train
"""


@pytest.mark.parametrize(
    ("expression", "is_found"),
    [
        ("train", True),
        ("replaced", True),
        ("decorated", True),
        ("lru", True),
        ("A.run", True),
        ("C.run", True),
        ("B.static", True),
        ("with_seed", False),
        ("cached", False),
        ("decorated.__wrapped__", False),
        ("B.run", False),
    ],
)
def test_what_the_name_finds_is_what_was_called(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, expression: str, is_found: bool
) -> None:
    write(tmp_path / "pyproject.toml", "")
    write(tmp_path / "wrapped.py", WRAPPED)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "wrapped", raising=False)
    module = importlib.import_module("wrapped")
    function = eval(expression, vars(module))
    if not is_found:
        with pytest.raises(UsageError, match="The pods would call another function"):
            locate(function)
        return
    reference = locate(function).function
    assert find(reference, tmp_path)(1) == function(1)


def test_a_function_of_a_module_that_was_loaded_again_is_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write(tmp_path / "again.py", "def train(): ...")
    monkeypatch.syspath_prepend(tmp_path)
    module = importlib.import_module("again")
    before = module.train
    importlib.reload(module)
    assert locate(before, tmp_path).function.qualname == "train"
