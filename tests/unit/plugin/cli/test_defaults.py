"""torchrun.toml."""

from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.cli import defaults

from ..laptop import Laptop, interrupt_at
from ..upload.test_reload import play_controller


def toml(text: str, directory: Path | None = None) -> None:
    (directory or Path.cwd()).joinpath("torchrun.toml").write_text(text)


def dry(laptop: Laptop, *arguments: str) -> dict[str, object]:
    result = laptop.run("submit", "--trust", "--dry-run=client", *arguments)
    assert result.exit_code == 0, result.output
    body: dict[str, object] = yaml.safe_load(result.stdout)["spec"]
    return body


def test_defaults_apply_in_subdirectories(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    toml(
        'queue = "gpu"\ncommand = "python train.py"\nnodes = 3\n'
        '[env]\nLR = "0.1"\n[submit]\nimage = "mine"\n[logs]\ntail = 5\n'
    )
    below = Path("a/b")
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    spec = dry(laptop)
    assert (spec["jobQueue"], spec["numNodes"], spec["image"]) == ("gpu", 3, "mine")
    assert spec["command"] == "python train.py"
    assert spec["env"] == [{"name": "LR", "value": "0.1"}]


def test_the_command_line_overrides_the_file(laptop: Laptop) -> None:
    toml('queue = "gpu"\nnodes = 3\ncommand = ["python", "a b.py"]\n')
    assert dry(laptop)["command"] == "python 'a b.py'"
    spec = dry(laptop, "--queue", "cpu", "--gpus", "4", "echo")
    assert (spec["jobQueue"], spec.get("numNodes"), spec["numGPUs"]) == ("cpu", None, 4)
    assert spec["command"] == "echo"
    toml('queue = "gpu"\ngpus = 3\n')
    assert dry(laptop, "--nodes", "2", "echo")["numNodes"] == 2


def test_the_directory_of_the_file_is_sent(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    toml('queue = "q"\n')
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    result = laptop.run("submit", "--dry-run", "x")
    assert "Uploading" in result.stderr
    assert "files in Project," in result.stderr
    Path("other.py").touch()
    assert "1 file in sub," in laptop.run("submit", "--dry-run", "-C", ".", "x").stderr


def test_the_directory_of_the_project_applies_to_arguments_as_well(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml('directory = "src"\n')
    Path("src").mkdir()
    Path("src/model.py").touch()
    assert CliRunner().invoke(cli, ["files", "-o", "name"]).stdout == "model.py\n"
    assert "train.py" in CliRunner().invoke(cli, ["files", "-o", "name", "."]).stdout
    Path("below").mkdir()
    monkeypatch.chdir("below")
    play_controller(laptop)
    result = laptop.run("sync", "run")
    assert result.exit_code == 0, result.output
    assert laptop.server.announced
    assert [entry.path for entry in laptop.server.announced.entries] == ["model.py"]


def test_the_command_to_continue_overrides_the_directory_of_the_file(laptop: Laptop) -> None:
    toml('directory = "src"\n')
    Path("src").mkdir()
    interrupt_at(laptop.server, "/proxy/")
    play_controller(laptop)
    result = laptop.run("sync", "run", ".")
    assert result.exit_code == 130, result.output
    assert f"  kubectl torchrun sync run {Path.cwd()} -n ns" in result.stderr


def test_a_file_in_the_home_directory_makes_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml("", tmp_path)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert defaults.project() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert defaults.project() == tmp_path / "work"


def test_a_timeout_of_the_file_applies_to_commands_that_wait(laptop: Laptop) -> None:
    toml('queue = "gpu"\ntimeout = "5m"\n')
    assert dry(laptop, "echo")["jobQueue"] == "gpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('quue = "x"', "Unknown key quue. Did you mean queue?"),
        ("[logs]\ntial = 3", "[logs]: Unknown key tial. Did you mean tail?"),
        ('[list]\nimage = "x"', "[list]: Unknown key image. Valid keys:"),
        ('kubeconfig = "/x"', "kubeconfig cannot be set here. Use --kubeconfig or KUBECONFIG"),
        ("queue = ", "Cannot read "),
        ("after = " + "[" * 5000, "Cannot read "),
        ("nodes = 1" + "0" * 5000, "Cannot read "),
        ("[sumbit]\nqueue = 'x'", "Unknown key sumbit."),
    ],
)
def test_mistakes_are_named_with_their_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    toml(text)
    result = CliRunner().invoke(cli, ["submit", "x"])
    assert result.exit_code == 2
    assert str(tmp_path / "torchrun.toml") in result.output
    assert message in result.output
    assert CliRunner().invoke(cli, ["submit", "--help"]).exit_code == 0


@pytest.mark.parametrize(
    ("text", "words", "message"),
    [
        ('nodes = "many"', ["submit", "x"], "'many' is not a valid integer"),
        ("nodes = 1.5", ["submit", "x"], "'1.5' is not a valid integer"),
        ("node = [0, 1.5]", ["logs", "x"], "'1.5' is not a valid integer"),
    ],
)
def test_a_value_of_the_wrong_type_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, words: list[str], message: str
) -> None:
    monkeypatch.chdir(tmp_path)
    toml(text)
    result = CliRunner().invoke(cli, words)
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.parametrize("text", ['image = "mine"\nwait = "Complete"\nname = "mine"', "x = 1", "["])
def test_a_program_can_ignore_the_file(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    toml(text)
    Path("sub").mkdir()
    Path("sub/train.py").touch()
    monkeypatch.chdir("sub")
    words = ["--no-defaults", f"--kubeconfig={laptop.kubeconfig}", "-n", "ns", "submit"]
    result = CliRunner().invoke(cli, [*words, "--dry-run=client", "--queue=q", "x"])
    assert result.exit_code == 0, result.output
    body = yaml.safe_load(result.stdout)
    assert body["metadata"]["name"].startswith("sub-")
    assert "image" not in body["spec"]
