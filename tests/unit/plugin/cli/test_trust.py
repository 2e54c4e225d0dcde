"""torchrun.toml of a repository: which values it may set, and the confirmation by the user."""

import os
import shutil
from pathlib import Path

import click
import pytest
import yaml

from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.cli import defaults, trust

from ..laptop import Laptop
from ..test_pty import terminal

DRY = ("submit", "--dry-run=client", "--queue", "q")


def toml(text: str) -> None:
    Path(defaults.FILE).write_text(text)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('command = "rm -rf /"', DRY),
        ('image = "evil"', (*DRY, "x")),
        ('env = {PYTHONPATH = "evil"}', (*DRY, "x")),
        ('[submit]\nenv = {PYTHONPATH = "evil"}', (*DRY, "x")),
        ('[submit]\nimage = "evil"', (*DRY, "x")),
        ('context = "c"', ("list",)),
        ("image = 2024-01-01", (*DRY, "x")),
        ('namespace = "theirs"', ("list",)),
        ('filename = "job.yaml"', DRY),
        ('directory = "/etc"', (*DRY, "x")),
        ('directory = "../other"', (*DRY, "x")),
        ('directory = "link"', (*DRY, "x")),
        ('directory = "../other"', ("sync", "run")),
        ('overlay = "../other"', (*DRY, "x")),
        ("yes = true", ("cancel", "run")),
        ('[exec]\ncommand = "evil"', ("exec", "run")),
        ('address = "0.0.0.0"', ("port-forward", "run", "80")),
    ],
)
def test_values_of_a_file_need_one_confirmation(
    laptop: Laptop, tmp_path: Path, text: str, words: tuple[str, ...]
) -> None:
    (tmp_path / "other").mkdir()
    Path("link").symlink_to(tmp_path / "other")
    laptop.job("run")
    toml(text)
    namespace = "" if "namespace" in text else "ns"
    before = len(laptop.server.requests)
    refused = laptop.run(*words, namespace=namespace)
    assert refused.exit_code == 2, refused.output
    key, _, value = text.rpartition("\n")[2].partition(" = ")
    assert f"{key} = " in refused.stderr
    assert value.rpartition(" = ")[2].strip('"}') in refused.stderr
    assert "--trust" in refused.stderr
    assert len(laptop.server.requests) == before
    assert ("torchrunjobs", "run") in laptop.server.objects


def test_a_confirmation_holds_until_the_file_changes(laptop: Laptop) -> None:
    toml('command = "python train.py"\nnodes = 1\n')
    assert laptop.run(*DRY, "--trust").exit_code == 0
    assert laptop.run(*DRY).exit_code == 0
    toml('command = "python train.py"\nnodes = 2\n')
    assert yaml.safe_load(laptop.run(*DRY).stdout)["spec"]["numNodes"] == 2
    for changed in (
        'command = "python evil.py"\n',
        'command = "python train.py"\nimage = "evil"\n',
    ):
        toml(changed)
        assert laptop.run(*DRY).exit_code == 2
    toml('command = "python train.py"\n')
    assert laptop.run(*DRY).exit_code == 0
    # The same file in another repository needs a new confirmation.
    shutil.copytree(Path.cwd(), Path.cwd().parent / "copy")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(Path.cwd().parent / "copy")
        assert laptop.run(*DRY).exit_code == 2


def test_a_link_with_a_new_target_needs_a_new_confirmation(laptop: Laptop, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "file").touch()
    Path("link").symlink_to(tmp_path / "one")
    toml('directory = "link"')
    assert laptop.run(*DRY, "--trust", "x").exit_code == 0
    Path("link").unlink()
    Path("link").symlink_to(tmp_path / "two")
    assert laptop.run(*DRY, "x").exit_code == 2


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ('command = "x"', (*DRY, "y")),
        ('context = "evil"', (*DRY, "--context", "c", "y")),
        ('image = "x"', (*DRY, "--image", "mine", "y")),
        ('command = "x"', ("list",)),
        ('[logs]\ncontext = "x"', ("list",)),
        ('directory = "sub"', (*DRY, "y")),
        ('queue = "q"\nnodes = 2\nafter = ["one"]', (*DRY, "y")),
    ],
)
def test_harmless_values_need_no_confirmation(
    laptop: Laptop, text: str, words: tuple[str, ...]
) -> None:
    Path("sub").mkdir()
    Path("sub/file").touch()
    toml(text)
    result = laptop.run(*words)
    assert result.exit_code == 0, result.output


def test_a_job_file_overrides_the_command_of_the_project(laptop: Laptop) -> None:
    toml('command = "evil"\nimage = "evil"\nenv = {A = "evil"}')
    body = {"apiVersion": "torchrun.ai/v1alpha1", "kind": "TorchrunJob", "spec": {"command": "x"}}
    Path("job.yaml").write_text(yaml.safe_dump(body))
    result = laptop.run(*DRY, "-f", "job.yaml")
    assert result.exit_code == 0, result.output
    assert yaml.safe_load(result.stdout)["spec"]["command"] == "x"


def test_the_file_in_the_home_directory_is_trusted(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch
) -> None:
    toml('command = "x"')
    monkeypatch.setenv("HOME", str(Path.cwd()))
    assert laptop.run(*DRY).exit_code == 0


def as_another_user(monkeypatch: pytest.MonkeyPatch, *paths: Path) -> None:
    """Make these files those of another user; as root, only these."""
    if os.getuid() == 0:
        for path in paths:
            os.chown(path, 54321, -1, follow_symlinks=False)
    else:
        monkeypatch.setattr(os, "getuid", lambda: 54321)


@pytest.mark.parametrize("words", [(*DRY, "x"), ("list",)])
@pytest.mark.parametrize("owned", ["torchrun.toml", ".", "link"])
@pytest.mark.parametrize("text", ["", "nodes = 3"])
def test_the_file_of_another_user_needs_a_confirmation(
    laptop: Laptop, monkeypatch: pytest.MonkeyPatch, owned: str, words: tuple[str, ...], text: str
) -> None:
    """One that is created in a directory for all users, such as /tmp."""
    if owned == "link":
        Path("file").write_text(text)
        Path("torchrun.toml").symlink_to("file")
        owned = "torchrun.toml"
    else:
        toml(text)
    as_another_user(monkeypatch, Path(owned))
    below = Path("below")
    below.mkdir()
    (below / "train.py").touch()
    shared = Path.cwd()
    monkeypatch.chdir(below)
    refused = laptop.run(*words)
    assert refused.exit_code == 2, refused.output
    assert f'directory = "{shared}"' in refused.stderr
    assert "the file belongs to user " in refused.stderr
    assert "or use a torchrun.toml of your own here." in refused.stderr
    assert ("nodes = 3" in refused.stderr) == bool(text)
    assert not laptop.server.requests
    assert laptop.run(*words, "--trust").exit_code == 0
    assert laptop.run(*words).exit_code == 0
    (shared / defaults.FILE).write_text(f"{text}\ntail = 2")
    assert laptop.run(*words).exit_code == 2


def test_a_read_only_home_directory_asks_again(
    laptop: Laptop, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "file"))
    toml('command = "x"')
    assert laptop.run(*DRY, "--trust").exit_code == 0
    assert laptop.run(*DRY).exit_code == 2


@pytest.mark.parametrize(("answer", "code"), [(b"y\n", 0), (b"n\n", 2), (b"\n", 2), (b"\x04", 2)])
def test_a_terminal_gets_a_prompt(laptop: Laptop, answer: bytes, code: int) -> None:
    toml('command = "python train.py"')
    with terminal(laptop, *DRY) as screen:
        screen.until(b"[y/N]")
        assert b'command = "python train.py"' in screen.seen
        screen.press(answer)
        assert screen.end() == code
    assert laptop.run(*DRY).exit_code == code


def test_exec_ignores_the_command_of_a_project(laptop: Laptop) -> None:
    toml('command = "python train.py"')
    context = cli.commands["exec"].make_context("exec", ["run"], parent=click.Context(cli))
    assert context.params["command"] == ()


def test_cluster_flags_before_the_command_override_the_file(laptop: Laptop) -> None:
    from click.testing import CliRunner

    laptop.job("run", metadata={"namespace": "ns"})
    toml('namespace = "theirs"')
    words = [f"--kubeconfig={laptop.kubeconfig}", "-n", "ns", "list"]
    result = CliRunner().invoke(cli, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    assert "/namespaces/ns/" in laptop.server.requests[-1]


def test_every_flag_is_classified() -> None:
    """A new flag may choose what runs and where. Add it to _KEYS, or here if it does not."""
    harmless = {
        "after", "all-namespaces", "attempt", "color", "container", "detach", "dev", "dry-run",
        "exclude", "follow", "gpus", "gpus-per-node", "include", "local", "name", "node", "nodes", "output", "phase",
        "prefix", "previous", "queue", "rank", "raw", "reload", "runtime-image", "selector", "since", "stdin",
        "stop-on-repeated-failure", "tail", "tensorboard", "timeout", "timestamps", "tty",
        "upload-timeout", "wait", "watch",
    }  # fmt: skip
    flags = {flag for command in cli.commands.values() for flag in defaults._flags(command)}
    assert flags - harmless - set(defaults._REFUSED) == trust._KEYS | trust._DIRECTORIES
