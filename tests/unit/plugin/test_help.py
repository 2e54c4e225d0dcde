"""Help texts: every command has examples, and each of them parses."""

import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import click
import pytest
from click.testing import CliRunner

from kubectl_torchrun import commands, completion, version
from kubectl_torchrun.__main__ import cli
from kubectl_torchrun.cli import complete

from .laptop import Laptop

DOCS = Path(__file__).parents[3] / "docs" / "plugin.md"
COMMANDS = sorted(cli.commands)


def lines_of(text: str) -> Iterator[str]:
    """The command lines in a help text or page, without what a shell adds to them."""
    for line in text.splitlines():
        line = line.strip().removeprefix("$ ")
        if line.startswith("kubectl torchrun "):
            yield line.partition(" #")[0].partition(" | ")[0].partition(" > ")[0].strip()


def parse(line: str) -> click.Context:
    """Parse like click, without calling the command. Raises click's errors."""
    words = shlex.split(line)[2:]
    with cli.make_context("kubectl torchrun", words) as outer:
        name, command, rest = cli.resolve_command(outer, [*outer._protected_args, *outer.args])
        assert command is not None
        return command.make_context(name, rest, parent=outer)


@pytest.mark.parametrize("command", COMMANDS)
def test_the_examples_of_every_command_parse(command: str) -> None:
    shown = CliRunner().invoke(cli, [command, "--help"]).stdout
    found = [line for line in lines_of(shown) if line.split()[2] == command]
    assert found, shown
    for line in found:
        assert parse(line).command.name == command
    assert "Exit codes:" not in shown


def test_the_examples_of_the_group_and_the_pages_parse() -> None:
    shown = CliRunner().invoke(cli, ["--help"]).stdout
    assert "Exit codes:" in shown
    assert "\n  130  Interrupted by Ctrl-C" in shown
    for line in (*lines_of(shown), *lines_of(DOCS.read_text())):
        parse(line)


@pytest.mark.long
def test_help_imports_few_modules() -> None:
    script = (
        "import sys, kubectl_torchrun.__main__ as m\n"
        "for name in ['', *m.cli.commands]:\n"
        "    try: m.cli([*name.split(), '--help'])\n"
        "    except SystemExit: pass\n"
        "heavy = {'httpcore', 'rich', 'anyio', 'msgspec', 'yaml'} & set(sys.modules)\n"
        "heavy |= {m for m in sys.modules if m.startswith('torchrun_api.')}\n"
        "heavy -= {'torchrun_api.contract', 'torchrun_api.contract.exit_codes'}\n"
        "sys.exit(repr(heavy) if heavy else 0)"
    )
    ended = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


def test_every_command_has_a_module_of_its_name() -> None:
    modules = {path.stem.replace("_", "-") for path in Path(commands.__file__).parent.glob("*.py")}
    assert modules - {"--init--"} == set(COMMANDS)
    assert [command.name for command in cli.commands.values()] == list(cli.commands)


def test_every_command_and_exit_code_stands_in_the_pages() -> None:
    from kubectl_torchrun import errors

    page, exit_codes = DOCS.read_text(), (DOCS.parent / "exit-codes.md").read_text()
    for command in COMMANDS:
        assert f"`{command}" in page, command
    for name, code in vars(errors).items():
        if name.isupper():
            assert f"| {code} " in exit_codes, name


@pytest.mark.parametrize("width", [60, 80, 200])
@pytest.mark.parametrize("command", ["", *COMMANDS])
def test_help_without_examples_fits_on_a_screen(command: str, width: int) -> None:
    words = [command, "--help"] if command else ["--help"]
    shown = CliRunner().invoke(cli, words, terminal_width=width).stdout
    for line in shown.splitlines():
        assert len(line) <= max(width, 100)


@pytest.mark.long
def test_flags_of_the_cluster_may_stand_before_the_command(laptop: Laptop) -> None:
    laptop.job("run")
    flags = [f"--kubeconfig={laptop.kubeconfig}", "-n", "ns"]
    shown = CliRunner().invoke(cli, [*flags, "list", "-o", "name"]).stdout
    assert shown == "torchrunjob.torchrun.ai/run\n"


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        *(("90", 90), ("90s", 90), ("1h30m", 5400), ("1.5m", 90), ("0.5s", 0.5)),
        *(("5d", 432_000), ("1d12h", 129_600)),
    ],
)
def test_durations(text: str, seconds: float) -> None:
    line = f"kubectl torchrun logs j --since {text}"
    assert parse(line).params["since"] == seconds


@pytest.mark.parametrize("text", ["", "x", "-1", "0", "5 m", "1w"])
def test_invalid_durations(text: str) -> None:
    with pytest.raises(click.UsageError, match=r"not a duration|must be greater than 0"):
        parse(f"kubectl torchrun logs j --since={text!r}")


def test_an_option_without_its_value_consumes_no_argument() -> None:
    params = parse("kubectl torchrun submit --wait --dry-run python train.py").params
    assert params["wait"] == "Complete"
    assert params["dry_run"] == "server"
    assert params["command"] == ("python", "train.py")
    assert parse("kubectl torchrun submit -- x --wait").params["wait"] == ""


@pytest.mark.parametrize(
    "line",
    [
        "exec j --node 1 --rank 2",
        "port-forward j",
        "port-forward j eighty",
        "port-forward j 1 2 --tensorboard d",
        "cancel j --wait=Running",
        "cancel",
        "scale j",
        "scale j --nodes 0",
        "sync j --watch --wait",
        "submit --timeout 5m x",
        "suspend j --timeout 5m",
    ],
)
def test_wrong_arguments_send_no_request(line: str) -> None:
    result = CliRunner().invoke(cli, line.split())
    assert result.exit_code == 2
    assert "Error: " in result.output


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("get", "Unknown command get. Use list, or status JOB -o yaml."),
        ("get torchrunjobs", "Unknown command get. Use list, or status JOB -o yaml."),
        ("describe run", "Unknown command describe. Use status JOB, or why JOB."),
        ("delete run", "Unknown command delete. Use cancel JOB."),
        ("ls", "Unknown command ls. Did you mean list?"),
        ("rm run", "Unknown command rm. Use cancel JOB."),
        ("lits", "Unknown command lits. Did you mean list?"),
        ("xyz", "Unknown command xyz. List the commands with --help."),
    ],
)
def test_unknown_commands_suggest_the_right_one(line: str, message: str) -> None:
    result = CliRunner().invoke(cli, line.split(), prog_name="kubectl torchrun")
    assert result.exit_code == 2
    assert result.stderr == f"Error: {message}\nSee: kubectl torchrun --help\n"


@pytest.mark.parametrize(
    ("line", "message", "help_of"),
    [
        ("--bad", "No such option '--bad'.", "kubectl torchrun"),
        ("logs", "Missing argument 'JOB'.", "kubectl torchrun logs"),
        (
            "logs run --previous --attempt 1",
            "--previous and --attempt are mutually exclusive.",
            "kubectl torchrun logs",
        ),
        (
            "list --phase none",
            "Invalid value for '--phase': Unknown phase none. Valid phases: ",
            "kubectl torchrun list",
        ),
        *(
            (line, f"Invalid value for {message}", f"kubectl torchrun {line.split()[0]}")
            for line, message in {
                "list -o xml": "'--output' / '-o': xml is not one of name, wide, yaml, json.",
                "submit x --nodes many": "'--nodes': many is not a whole number.",
                "submit x --nodes ''": "'--nodes': An empty text is not a whole number.",
                "submit x --nodes 0": "'--nodes': 0 is too small. The smallest value is 1.",
                "logs x --tail -1": "'--tail': -1 is too small. The smallest value is 0.",
                "logs x --tail 2147483648": "'--tail': 2147483648 is too large. The largest",
                "logs x --since ''": "'--since': An empty text is not a duration.",
                "status ''": "'JOB': An empty text is not the name of a job.",
                "why a/b": "'JOB': a/b is not the name of a job.",
            }.items()
        ),
        ("list -w -o json", "--watch shows a table.", "kubectl torchrun list"),
    ],
)
def test_usage_errors_look_as_other_errors(line: str, message: str, help_of: str) -> None:
    result = CliRunner().invoke(cli, shlex.split(line), prog_name="kubectl torchrun")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith(f"Error: {message}")
    assert result.stderr.endswith(f"\nSee: {help_of} --help\n")


@pytest.mark.parametrize(
    ("words", "shown"),
    [
        ("help", "Usage: kubectl torchrun [OPTIONS] COMMAND"),
        ("help submit", "Usage: kubectl torchrun submit [OPTIONS] [COMMAND]..."),
        ("version", "kubectl torchrun, version "),
        ("-v", "kubectl torchrun, version "),
    ],
)
def test_help_and_version_are_also_words(words: str, shown: str) -> None:
    result = CliRunner().invoke(cli, words.split(), prog_name="kubectl torchrun")
    assert (result.exit_code, result.stderr) == (0, "")
    assert result.stdout.startswith(shown)


@pytest.mark.parametrize("name", ["run", "torchrunjob.torchrun.ai/run", "tj/run"])
def test_a_job_is_named_as_o_name_prints_it(name: str) -> None:
    assert parse(f"kubectl torchrun status {name}").params["job"] == "run"


def test_an_argument_that_is_not_utf_8_is_refused() -> None:
    result = CliRunner().invoke(cli, ["run", "caf\udce9.py"])
    assert result.exit_code == 2
    assert result.stderr.startswith(r"Error: The argument caf\udce9.py is not UTF-8.")


def test_no_command_prints_the_help() -> None:
    result = CliRunner().invoke(cli, [], prog_name="kubectl torchrun")
    assert (result.exit_code, result.stdout) == (2, "")
    assert result.stderr.startswith("Usage: kubectl torchrun [OPTIONS] COMMAND")


def test_the_version_is_known_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    def not_installed(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", not_installed)
    assert re.fullmatch(
        r"kubectl torchrun, version \d+\.\d+\.\d+ \(checkout\)\n",
        CliRunner().invoke(cli, ["--version"]).stdout,
    )
    monkeypatch.setattr(metadata, "version", lambda _: "1.2.3")
    shown = CliRunner().invoke(cli, ["--version"]).stdout
    assert shown == "kubectl torchrun, version 1.2.3\n"
    monkeypatch.setattr(metadata, "version", not_installed)
    monkeypatch.setattr(version, "_PROJECT", Path("/nowhere/pyproject.toml"))
    assert CliRunner().invoke(cli, ["--version"]).stdout == "kubectl torchrun, version unknown\n"


def completions(laptop: Laptop, capsys: pytest.CaptureFixture[str], *words: str) -> list[str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["kubectl_complete-torchrun", *words])
        completion.main()
    return capsys.readouterr().out.splitlines()


@pytest.mark.long
def test_completion_for_kubectl(
    laptop: Laptop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(complete, "_SECONDS", 60.0)  # a busy machine starts kubectl late
    assert completions(laptop, capsys, "que") == [
        "queues\tList queues with running and waiting jobs",
        ":4",
    ]
    assert completions(laptop, capsys, "scale", "j", "--no") == ["--nodes\tNumber of nodes.", ":4"]
    flags = ["--kubeconfig", str(laptop.kubeconfig)]
    assert completions(laptop, capsys, *flags, "list", "--context", "") == ["c", ":4"]
    assert completions(laptop, capsys, "list", "--phase", "su") == ["Succeeded", "Suspended", ":4"]
    assert completions(laptop, capsys, "submit", "-C", "x")[-1] == ":0"
    # The server in memory has no discovery, so kubectl completes nothing.
    assert completions(laptop, capsys, *flags, "logs", "") == [":4"]


@pytest.mark.long
def test_no_completion_without_kubectl(
    laptop: Laptop, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert completions(laptop, capsys, "list", "--context", "") == [":4"]


@pytest.mark.long
def test_a_closed_pipe_prints_no_error(laptop: Laptop) -> None:
    laptop.job("run", status={"phase": "Failed"})
    line = "2026-01-01T00:00:00.{:09}Z " + "x" * 200 + "\n"
    laptop.worker("run", 0, 0, *(line.format(n) for n in range(20_000)))
    flags = f"--kubeconfig={laptop.kubeconfig} -n ns"
    command = f"{sys.executable} -m kubectl_torchrun logs run {flags} | head -n 2"
    ended = subprocess.run(
        ["bash", "-c", f"set -o pipefail; {command}"], capture_output=True, text=True, timeout=300
    )
    assert (ended.returncode, ended.stderr) == (141, "")
    assert len(ended.stdout.splitlines()) == 2
