"""The job's own environment: made once by a setup, found by every command after it."""

import json
import os
import select
import signal
import stat
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from torchrun_cluster import pidfd
from unit.runtime.launching import PYTHONS, Launched, Launcher, Result
from wheels import WHEEL, add_wheel


@dataclass(frozen=True)
class Job:
    """A job's pods: they share `store`, and `link` is each one's own."""

    launcher: Launcher
    store: Path
    link: Path
    code: Path

    def environment(self, key: str, **recipe: object) -> dict[str, str]:
        body = {"requirements": [], "command": "", **recipe}
        return {
            "TORCHRUN_ENV_STORE": str(self.store),
            "TORCHRUN_ENV_KEY": key,
            "TORCHRUN_ENV_DIR": str(self.link),
            "TORCHRUN_WORKING_DIR": str(self.code),
            "TORCHRUN_SYNC_WAIT_SECONDS": "0",
            "TORCHRUN_LAUNCHER": "none",
            **({"TORCHRUN_SETUP": json.dumps(body)} if recipe else {}),
        }

    def set_up(self, key: str = "one", **recipe: object) -> Result:
        return self.start_setup(key, **recipe).end()

    def start_setup(self, key: str = "one", **recipe: object) -> Launched:
        return self.launcher.start("true", "setup", **self.environment(key, **recipe))

    def run(self, line: "str | list[str]", **recipe: object) -> Result:
        return self.launcher.run(line, **self.environment("one", **recipe))

    def kept(self) -> list[str]:
        return sorted(path.name for path in self.store.iterdir())


@pytest.fixture(params=PYTHONS, ids=lambda path: Path(path).parents[1].name)
def job(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Job]:
    launcher = Launcher(request.param, tmp_path)
    code = tmp_path / "code"
    code.mkdir()
    yield Job(launcher, tmp_path / "store", tmp_path / "pod" / "env", code)
    launcher.clear()


def test_what_the_setup_command_installs_is_found_by_the_command(job: Job) -> None:
    add_wheel(job.code)
    made = job.set_up(command=f"pip install --no-index ./{WHEEL}")
    assert (made.exit_code, made.message) == (0, {}), made.out + made.err
    again = job.run(["python", "-c", "import greeting; greeting.main()"])
    assert (again.exit_code, again.out) == (0, "hello\n"), again.err
    assert job.run("greeting").out == "hello\n"
    assert job.run([sys.executable, "-c", "import greeting"]).exit_code == 1, "not in the image"


def test_requirements_come_before_the_setup_command(job: Job) -> None:
    add_wheel(job.code)
    (job.code / "requirements.txt").write_text(f"./{WHEEL}\n")
    made = job.set_up(
        requirements=["-r requirements.txt", "--no-index"],
        command=["sh", "-c", 'greeting > "$TORCHRUN_ENV_DIR/said"'],
    )
    assert made.exit_code == 0, made.out + made.err
    assert job.run('cat "$TORCHRUN_ENV_DIR/said"').out == "hello\n"


def test_the_image_is_seen_below_it(job: Job) -> None:
    """Also where the image's python is in a virtual environment itself, as this one's is."""
    assert job.set_up(command="python -c 'import pytest'").exit_code == 0
    told = job.run(["python", "-c", "import sys, pytest; print(sys.prefix)"])
    assert told.out == f"{job.link}\n", told.err


def test_it_is_made_once_for_a_key(job: Job) -> None:
    count = 'echo x >> "$HOME/made"'
    for _ in range(2):
        assert job.set_up(command=count).exit_code == 0
    assert (job.launcher.directory / "made").read_text() == "x\n"
    assert "already exists" in job.set_up(command=count).err
    assert job.set_up("two", command=count).exit_code == 0
    assert (job.launcher.directory / "made").read_text() == "x\nx\n"


def test_the_last_two_are_kept(job: Job) -> None:
    for number, key in enumerate(("a", "b", "c", "d")):
        job.store.mkdir(exist_ok=True)
        assert job.set_up(key, command="true").exit_code == 0
        os.utime(job.store / key / ".complete", (number, number))
    assert job.kept() == ["c", "d"]


def test_a_worker_makes_it_itself_where_the_recipe_is_given(job: Job) -> None:
    result = job.run('cat "$VIRTUAL_ENV/said"', command='echo here > "$VIRTUAL_ENV/said"')
    assert (result.exit_code, result.out) == (0, "here\n"), result.err


@pytest.mark.parametrize(
    ("recipe", "exit_code", "words"),
    [
        (
            {"command": "printf '1 %%\\r100 %%\\n'; echo 'no compiler' >&2; exit 3"},
            3,
            "setupCommand ended with exit code 3: 1 % | 100 % | no compiler",
        ),
        ({"command": "kill -9 $$"}, 137, "setupCommand ended with exit code 137"),
        (
            {"command": ["no-such-program"]},
            127,
            "Cannot start setupCommand: no-such-program: No such file or directory.",
        ),
        ({"requirements": ["--no-index", "nowhere"]}, 1, "No matching distribution found for now"),
        ({"requirements": ["-r 'half"]}, 1, "cannot be split into words: No closing quotation"),
    ],
    ids=["code", "signal", "program", "pip", "words"],
)
def test_a_failure_says_what_and_leaves_nothing_that_counts(
    job: Job, recipe: "dict[str, object]", exit_code: int, words: str
) -> None:
    result = job.set_up(**recipe)
    assert result.exit_code == exit_code
    assert result.message["reason"] == "SetupFailed"
    assert words in str(result.message["message"])
    assert all(name.startswith(".new-") for name in job.kept())
    assert job.set_up(command="true").exit_code == 0
    assert job.kept() == ["one"]


def test_what_another_setup_pod_removed_cannot_be_finished(job: Job) -> None:
    # As by the setup pod that follows a lost one, while the lost one still installs.
    removed = 'made=$(readlink "$TORCHRUN_ENV_DIR") && rm -r "$made" && mkdir "$made"'
    result = job.set_up(command=removed)
    assert result.exit_code == 125
    assert result.message["reason"] == "EnvironmentUnwritable"
    assert "one" not in job.kept()
    assert job.set_up(command="true").exit_code == 0
    assert job.kept() == ["one"]


def test_activate_leads_to_it(job: Job) -> None:
    assert job.set_up(command="true").exit_code == 0
    told = job.run('. "$TORCHRUN_ENV_DIR/bin/activate" && echo "$VIRTUAL_ENV"; deactivate')
    assert told.out == f"{job.link}\n"


def test_a_background_process_does_not_hold_it_up(job: Job) -> None:
    made = job.set_up(command="sleep 300 & echo $! > pid; echo done")
    assert made.exit_code == 0
    assert "done" in made.out
    os.kill(int((job.code / "pid").read_text()), signal.SIGKILL)


def test_a_stop_ends_the_setup_and_all_that_it_runs(job: Job) -> None:
    running = job.start_setup(command="echo $$; exec sleep 300")
    pid = int(running.line())
    watched = pidfd.open_pid(pid)
    running.stop()
    ended = running.end()
    assert (ended.exit_code, ended.message["reason"]) == (143, "Stopped")
    assert select.select([watched], [], [], 10)[0], "it is gone"
    os.close(watched)


def test_a_worker_says_that_the_environment_is_missing(job: Job) -> None:
    result = job.run("true")
    assert result.message["reason"] == "EnvironmentNotReady"
    assert "setup pod" in str(result.message["message"])


def test_a_store_that_cannot_be_written_is_said(job: Job) -> None:
    job.store.write_text("a file")
    assert job.set_up(command="true").message["reason"] == "EnvironmentNotReady"


def test_no_pip_is_said_where_requirements_need_one(job: Job) -> None:
    broken = job.code / "broken"
    (broken / "pip").mkdir(parents=True)
    (broken / "pip" / "__init__.py").write_text("raise ImportError('none')")
    environment = {**job.environment("one", requirements=["x"]), "PYTHONPATH": str(broken)}
    result = job.launcher.start("true", "setup", **environment).end()
    assert "this image does not have" in str(result.message["message"]), result.err
    alone = {**job.environment("two", command="true"), "PYTHONPATH": str(broken)}
    assert job.launcher.start("true", "setup", **alone).end().exit_code == 0


def test_an_unreadable_recipe_is_refused(job: Job) -> None:
    environment = {**job.environment("one"), "TORCHRUN_SETUP": "[]"}
    result = job.launcher.start("true", "setup", **environment).end()
    assert result.message["reason"] == "InvalidSetting"


def test_other_users_may_read_it(job: Job) -> None:
    assert job.set_up(command="true").exit_code == 0
    assert stat.S_IMODE((job.store / "one").stat().st_mode) == 0o755


def test_what_lies_in_the_place_of_an_environment_is_replaced(job: Job) -> None:
    (job.store / "one" / "half").mkdir(parents=True)
    assert job.set_up(command="true").exit_code == 0
    assert not (job.store / "one" / "half").exists()
