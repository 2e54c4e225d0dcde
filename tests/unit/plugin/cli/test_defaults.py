"""torchrun.toml."""

import os
import stat
from pathlib import Path

import pytest
import yaml
from click.testing import CliRunner

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.cli import defaults

from ..laptop import Laptop


def toml(text: str, directory: Path | None = None) -> None:
    (directory or Path.cwd()).joinpath("torchrun.toml").write_text(text)


def dry(laptop: Laptop, *arguments: str) -> dict[str, object]:
    result = laptop.run("submit", "--dry-run=client", *arguments)
    assert result.exit_code == 0, result.output
    body: dict[str, object] = yaml.safe_load(result.stdout)["spec"]
    return body


@pytest.mark.long
def test_defaults_apply_in_subdirectories(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    toml(
        'queue = "gpu"\nnodes = 3\nafter = ["one", "two"]\n[submit]\ndev = true\n[logs]\ntail = 5\n'
    )
    below = Path("a/b")
    below.mkdir(parents=True)
    monkeypatch.chdir(below)
    spec = dry(laptop, "python train.py")
    assert (spec["jobQueue"], spec["numNodes"], spec["development"]) == ("gpu", 3, True)
    assert [each["name"] for each in spec["dependsOn"]] == ["one", "two"]


@pytest.mark.long
def test_the_command_line_overrides_the_file(laptop: Laptop) -> None:
    toml('queue = "gpu"\nnodes = 3\n')
    spec = dry(laptop, "--queue", "cpu", "--gpus", "4", "echo")
    assert (spec["jobQueue"], spec.get("numNodes"), spec["numGPUs"]) == ("cpu", None, 4)
    toml('queue = "gpu"\ngpus = 3\n')
    assert dry(laptop, "--nodes", "2", "echo")["numNodes"] == 2


@pytest.mark.long
def test_the_directory_of_the_file_is_sent(laptop: Laptop, monkeypatch: pytest.MonkeyPatch) -> None:
    toml('queue = "q"\n')
    Path("sub").mkdir()
    monkeypatch.chdir("sub")
    result = laptop.run("submit", "--dry-run", "x")
    assert "Uploading" in result.stderr
    assert "files in Project," in result.stderr
    Path("other.py").touch()
    assert "1 file in sub," in laptop.run("submit", "--dry-run", "-C", ".", "x").stderr


def test_a_file_in_the_home_directory_makes_no_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml("", tmp_path)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    assert defaults.project() == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert defaults.project() == tmp_path / "work"


@pytest.mark.long
def test_a_timeout_of_the_file_applies_to_commands_that_wait(laptop: Laptop) -> None:
    toml('queue = "gpu"\ntimeout = "5m"\n')
    assert dry(laptop, "echo")["jobQueue"] == "gpu"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('quue = "x"', "Unknown key quue. Did you mean queue?"),
        ("[logs]\ntial = 3", "[logs]: Unknown key tial. Did you mean tail?"),
        ("[list]\ngpus = 1", "[list]: Unknown key gpus. Valid keys:"),
        ('help = "x"', "Unknown key help."),
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
        ('nodes = "many"', ["submit", "x"], "many is not a whole number"),
        ("nodes = 1.5", ["submit", "x"], "1.5 is not a whole number"),
        ("node = [0, 1.5]", ["logs", "x"], "1.5 is not a whole number"),
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


@pytest.mark.long
@pytest.mark.parametrize("text", ['wait = "Complete"\nname = "mine"', "x = 1", "["])
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


REFUSED = (
    *('command = "x"', 'image = "x"', 'env = {PYTHONPATH = "x"}', 'filename = "job.yaml"'),
    *('directory = "/etc"', 'overlay = "/etc"', 'kubeconfig = "/x"', 'context = "x"'),
    *('runtime-image = "x"', "local = true", 'output-dir = "/etc"'),
    *('namespace = "x"', 'address = "0.0.0.0"', "yes = true", '[exec]\ncommand = "x"'),
    *('[submit]\nimage = "x"', '[sync]\ndirectory = "x"'),
)


@pytest.mark.parametrize("text", REFUSED)
def test_a_file_cannot_choose_what_runs_where_and_what_is_uploaded(
    laptop: Laptop, text: str
) -> None:
    toml(text)
    result = laptop.run("list")
    assert result.exit_code == 2, result.output
    key = text.rpartition("\n")[2].partition(" = ")[0]
    assert f"{key} cannot be set here" in result.stderr
    assert not laptop.server.requests


def test_every_flag_is_classified() -> None:
    """A new flag may choose what runs and where. Add it to _REFUSED, or here if it does not."""
    harmless = {
        "after", "all-namespaces", "attempt", "color", "container", "detach", "dev", "dry-run",
        "follow", "gpus", "gpus-per-node", "name", "node", "nodes", "output", "pdb", "phase", "port",
        "prefix", "previous", "queue", "rank", "raw", "reload", "selector", "since", "stdin",
        "stop-on-repeated-failure", "tail", "tensorboard", "timeout", "timestamps", "tty",
        "upload-timeout", "wait", "watch",
    }  # fmt: skip
    flags = {flag for command in cli.commands.values() for flag in defaults._parameters(command)}
    assert flags - harmless == defaults._REFUSED - {"command"}


@pytest.mark.parametrize("is_link", [False, True])
def test_the_file_of_another_user_in_a_directory_above_is_refused(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, is_link: bool
) -> None:
    """One that is created in a directory for all users, such as /tmp."""
    toml("nodes = 3")
    path = Path("torchrun.toml").absolute()
    if is_link:
        path.rename("file")
        path.symlink_to("file")
    Path("below").mkdir()
    lstat = Path.lstat

    def owned(self: Path) -> os.stat_result:
        result = list(lstat(self))
        result[stat.ST_UID] = 54321
        return os.stat_result(result)

    monkeypatch.setattr(Path, "lstat", lambda self: owned(self) if self == path else lstat(self))
    monkeypatch.chdir("below")
    refused = laptop.run("list")
    assert refused.exit_code == 2, refused.output
    assert f"{path} belongs to another user. Use a torchrun.toml of your own" in refused.stderr
    assert not laptop.server.requests
    words = ["--no-defaults", f"--kubeconfig={laptop.kubeconfig}", "-n", "ns", "list"]
    assert CliRunner().invoke(cli, words).exit_code == 0
    toml("nodes = 1")
    assert laptop.run("list").exit_code == 0
