"""The virtual environment of a job: created once by the setup, and used by every command."""

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

pytestmark = pytest.mark.long  # processes


@dataclass(frozen=True)
class Job:
    """The pods of a job. They share `store`; each has its own `link`."""

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


def test_the_command_finds_packages_of_the_setup_command(job: Job) -> None:
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


def test_packages_of_the_image_are_visible(job: Job) -> None:
    """Also if the python of the image is in a virtual environment, as it is in this test."""
    assert job.set_up(command="python -c 'import pytest'").exit_code == 0
    result = job.run(["python", "-c", "import sys, pytest; print(sys.prefix)"])
    assert result.out == f"{job.link}\n", result.err


def test_an_environment_is_created_once_for_each_key(job: Job) -> None:
    count = 'echo x >> "$HOME/made"'
    for _ in range(2):
        assert job.set_up(command=count).exit_code == 0
    assert (job.launcher.directory / "made").read_text() == "x\n"
    assert "already exists" in job.set_up(command=count).err
    assert job.set_up("two", command=count).exit_code == 0
    assert (job.launcher.directory / "made").read_text() == "x\nx\n"


def test_the_last_two_environments_stay(job: Job) -> None:
    for number, key in enumerate(("a", "b", "c", "d")):
        job.store.mkdir(exist_ok=True)
        assert job.set_up(key, command="true").exit_code == 0
        os.utime(job.store / key / ".complete", (number, number))
    assert job.kept() == ["c", "d"]


def test_a_worker_with_a_recipe_creates_its_own_environment(job: Job) -> None:
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
def test_a_failure_is_reported_and_leaves_nothing(
    job: Job, recipe: "dict[str, object]", exit_code: int, words: str
) -> None:
    """It may have filled the PVC, on which the sync pod writes the next workspace."""
    result = job.set_up(**recipe)
    assert result.exit_code == exit_code
    assert result.message["reason"] == "SetupFailed"
    assert words in str(result.message["message"])
    assert job.kept() == []
    assert job.set_up(command="true").exit_code == 0
    assert job.kept() == ["one"]


def test_what_another_setup_pod_removed_cannot_be_finished(job: Job) -> None:
    # As by the setup pod that follows a lost one, while the lost one still installs.
    removed = 'made=$(readlink "$TORCHRUN_ENV_DIR") && rm -r "$made" && mkdir "$made"'
    result = job.set_up(command=removed)
    assert result.exit_code == 125
    assert result.message["reason"] == "EnvironmentNotReady"
    assert "one" not in job.kept()
    assert job.set_up(command="true").exit_code == 0
    assert job.kept() == ["one"]


def test_activate_selects_the_environment(job: Job) -> None:
    assert job.set_up(command="true").exit_code == 0
    result = job.run('. "$TORCHRUN_ENV_DIR/bin/activate" && echo "$VIRTUAL_ENV"; deactivate')
    assert result.out == f"{job.link}\n"


def test_a_background_process_does_not_delay_the_setup(job: Job) -> None:
    made = job.set_up(command="sleep 300 & echo $! > pid; echo done")
    assert made.exit_code == 0
    assert "done" in made.out
    os.kill(int((job.code / "pid").read_text()), signal.SIGKILL)


def test_a_stop_ends_the_setup_and_its_children(job: Job) -> None:
    running = job.start_setup(command="echo $$; exec sleep 300")
    pid = int(running.line())
    watched = pidfd.open_pid(pid)
    running.stop()
    ended = running.end()
    assert (ended.exit_code, ended.message["reason"]) == (143, "Stopped")
    assert select.select([watched], [], [], 120)[0], "the child was killed"
    os.close(watched)


def test_a_missing_environment_is_reported(job: Job) -> None:
    result = job.run("true")
    assert result.message["reason"] == "EnvironmentNotReady"
    assert "setup pod" in str(result.message["message"])


def test_a_read_only_store_is_reported(job: Job) -> None:
    job.store.write_text("a file")
    assert job.set_up(command="true").message["reason"] == "EnvironmentNotReady"


def test_a_missing_pip_is_reported(job: Job) -> None:
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


def test_a_file_in_place_of_an_environment_is_replaced(job: Job) -> None:
    (job.store / "one" / "half").mkdir(parents=True)
    assert job.set_up(command="true").exit_code == 0
    assert not (job.store / "one" / "half").exists()
