"""How the launcher passes signals to ranks, their agent and a shell, and kills the rest."""

import os
import signal
import subprocess

import pytest

from unit.runtime.launching import FOLDER, SECONDS, Launcher, await_end, changed, script

pytestmark = pytest.mark.long  # processes

RANKS = """
    import os, signal, sys, time
    def saving(number, frame):
        os.write(1, b"saving %d\\n" % number)
        sys.exit(0)
    signal.signal(signal.SIGTERM, saving)
    signal.signal(signal.SIGINT, saving)
    os.write(1, b"ready\\n")
    while True:
        time.sleep(60)
"""


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "line", ["{python} {name}", "cd . && {python} {name}", "true; {python} {name}; true"]
)
def test_passes_signals_through_a_shell(launcher: Launcher, number: int, line: str) -> None:
    name = script(launcher.directory, RANKS)
    command = line.format(python=launcher.python, name=name)
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none")
    assert launched.line() == "ready"
    launched.stop(number)
    result = launched.end()
    assert f"saving {number}" in result.out
    assert result.exit_code == 143
    assert result.message["reason"] == "Stopped"
    assert result.message["signal"] == number


# Needs some time to end. The shell around it gets no signal, so it does not cut this short.
# sigwait, because a handler may run too late for pause(), or during a wait() for a rank.
AGENT = """
    import os, signal, subprocess, sys, time
    ranks = [
        subprocess.Popen([sys.executable, "rank.py"], env=dict(os.environ, LOCAL_RANK=str(n)))
        for n in range(2)
    ]
    signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])
    os.write(1, b"ready\\n")
    signal.sigwait([signal.SIGTERM])
    alive = sum(rank.poll() is None for rank in ranks)
    time.sleep(0.5)
    os.write(1, b"agent stopped, ranks left: %d\\n" % alive)
    sys.exit(1)
"""


def test_signals_the_ranks_first_and_their_parent_after_them(launcher: Launcher) -> None:
    script(
        launcher.directory, RANKS.replace("sys.exit(0)", "time.sleep(0.5); sys.exit(0)"), "rank.py"
    )
    agent = script(launcher.directory, AGENT, "agent.py")
    launched = launcher.start(f"true && {launcher.python} {agent}")
    assert [launched.line() for _ in range(3)] == ["ready"] * 3
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving 15", "saving 15", "agent stopped, ranks left: 0"]
    assert result.exit_code == 143


# Like torchrun: when a rank fails, the others get SIGTERM, and SIGKILL later. It acts ten seconds
# after it has noticed, so that the launcher is first on a busy machine, too.
HASTY_AGENT = """
    import os, signal, subprocess, sys, time
    programs = [("rank.py", 0), ("other.py", 1)]
    ranks = [
        subprocess.Popen([sys.executable, name], env=dict(os.environ, LOCAL_RANK=str(n)))
        for name, n in programs
    ]
    while not any(rank.poll() for rank in ranks):
        time.sleep(0.1)
    time.sleep(10)
    for rank in ranks:
        if rank.poll() is None:
            rank.terminate()
    time.sleep(0.5)
    for rank in ranks:
        if rank.poll() is None:
            rank.kill()
    sys.exit(1)
"""
SAVING = """
    import os, signal, sys, time
    def save(number, frame):
        os.write(1, b"saving\\n")
        time.sleep(2)
        os.write(1, b"saved\\n")
        sys.exit(0)
    signal.signal(signal.SIGTERM, save)
    os.write(1, b"ready\\n")
    while True:
        time.sleep(60)
"""
# One rank dies of the signal. The other has a handler and fails later.
OTHERS = {
    "dies": "signal.signal(signal.SIGTERM, signal.SIG_DFL)",
    "fails": "signal.signal(signal.SIGTERM, lambda *_: (time.sleep(0.5), os._exit(1)))",
}
# Whether the agent is halted, for its ranks.
HALTED = "open(f'/proc/{os.getppid()}/stat').read().rpartition(')')[2].split()[0] == 'T'"


@pytest.mark.parametrize("other", OTHERS)
def test_a_rank_can_finish_its_checkpoint_after_others_died(launcher: Launcher, other: str) -> None:
    """A second SIGTERM would call the handler again during the first call."""
    handler = "signal.signal(signal.SIGTERM, save)"
    saving = SAVING.replace("time.sleep(2)", f"while not ({HALTED}): time.sleep(0.05)")
    assert saving != SAVING
    script(launcher.directory, saving, "rank.py")
    script(launcher.directory, SAVING.replace(handler, OTHERS[other]), "other.py")
    agent = script(launcher.directory, HASTY_AGENT, "agent.py")
    launched = launcher.start([launcher.python, agent], TORCHRUN_LAUNCHER="none")
    assert [launched.line(), launched.line()] == ["ready", "ready"]
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving", "saved"]
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")


def test_setproctitle_keeps_the_variables_by_which_a_rank_is_found(launcher: Launcher) -> None:
    """By default it overwrites /proc/PID/environ."""
    assert launcher.run("echo $SPT_NOENV").out == "1\n"
    assert launcher.run("echo $SPT_NOENV;", SPT_NOENV="").out == "\n"


# Sees the end of a rank at once and terminates the others. Prints when it was stopped.
PROMPT_AGENT = """
    import os, signal, subprocess, sys
    signal.signal(signal.SIGCONT, lambda *_: os.write(1, b"agent continued\\n"))
    signal.signal(signal.SIGTERM, lambda *_: None)
    others = [["sleep", "100"]] * int(sys.argv[1])
    ranks = [
        subprocess.Popen(argv, env=dict(os.environ, LOCAL_RANK=str(n))).pid
        for n, argv in enumerate([*others, [sys.executable, "rank.py"]])
    ]
    while ranks:
        ranks.remove(os.wait()[0])
        for rank in ranks:
            os.kill(rank, signal.SIGTERM)
"""


def test_the_agent_is_stopped_before_a_rank_dies_of_the_signal(launcher: Launcher) -> None:
    """It would send a second SIGTERM to the rank that saves, while others get their first."""
    script(launcher.directory, SAVING, "rank.py")
    agent = script(launcher.directory, PROMPT_AGENT, "agent.py")
    launched = launcher.start([launcher.python, agent, "50"], TORCHRUN_LAUNCHER="none")
    assert launched.line() == "ready"
    launched.stop()
    assert launched.end().out.splitlines() == ["saving", "saved", "agent continued"]


@pytest.mark.parametrize(("rank", "lines"), [("saves", ["saving", "saved"]), ("dies", [])])
def test_an_agent_is_not_stopped_if_its_ranks_end_alike(
    launcher: Launcher, rank: str, lines: "list[str]"
) -> None:
    handler = "signal.signal(signal.SIGTERM, save)"
    text = SAVING if rank == "saves" else SAVING.replace(handler, OTHERS["dies"])
    script(launcher.directory, text, "rank.py")
    agent = script(launcher.directory, PROMPT_AGENT, "agent.py")
    command = [launcher.python, agent, "0"]
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="30")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == lines
    assert result.exit_code == 143
    assert "forwarded SIGTERM to python" in result.err


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("trap 'echo trapped' TERM; {python} {name}; echo after", ["trapped", "after"]),
        (
            "trap 'kill -TERM $!; wait $!; echo trapped; exit' TERM; {python} {name} & wait $!",
            ["trapped"],
        ),
        ("trap 'echo trapped' TERM; cd . && sh -c '{python} {name}; true'", ["trapped"]),
    ],
    ids=["foreground", "background", "shell in a shell"],
)
def test_runs_the_trap_of_a_shell_and_signals_its_program_once(
    launcher: Launcher, line: str, lines: "list[str]"
) -> None:
    name = script(launcher.directory, SAVING)
    command = line.format(python=launcher.python, name=name)
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving", "saved", *lines]
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")


@pytest.mark.parametrize(
    ("trap", "lines"), [("true", []), ("trap 'echo trapped' TERM", ["trapped", "after"])]
)
def test_a_script_with_an_interpreter_line_is_a_shell(
    launcher: Launcher, trap: str, lines: "list[str]"
) -> None:
    """The kernel names its process after the script, not after the shell.

    Without a trap, the shell gets the signal once its program has ended: it may print or not.
    """
    name = script(launcher.directory, SAVING)
    text = f"""
        #!/bin/sh
        {trap}
        {launcher.python} {name}
        echo after
    """
    run = launcher.directory / script(launcher.directory, text, "run.sh")
    run.write_text(run.read_text().lstrip())
    run.chmod(0o755)
    launched = launcher.start([str(run)], TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="30")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines()[: 2 + len(lines)] == ["saving", "saved", *lines]
    assert ("forwarded SIGTERM to run.sh" in result.err) is bool(lines)
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")


WRAPPER = """
    import subprocess, sys
    sys.exit(subprocess.call([sys.executable, "rank.py"]))
"""


def test_a_program_can_save_after_its_wrapper_died_of_the_signal(launcher: Launcher) -> None:
    script(launcher.directory, SAVING, "rank.py")
    wrapper = script(launcher.directory, WRAPPER, "wrapper.py")
    command = [launcher.python, wrapper]
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="30")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving", "saved"]
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")


def test_a_program_without_its_wrapper_is_killed_after_the_grace_period(
    launcher: Launcher,
) -> None:
    endless = SAVING.replace("sys.exit(0)", "return")
    assert endless != SAVING
    script(launcher.directory, endless, "rank.py")
    wrapper = script(launcher.directory, WRAPPER, "wrapper.py")
    command = [launcher.python, wrapper]
    launched = launcher.start(command, TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="3")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert "the grace period is over: killing the remaining processes" in result.err
    assert result.exit_code == 143


def test_a_trap_runs_after_the_ranks_have_ended(launcher: Launcher) -> None:
    script(launcher.directory, RANKS, "rank.py")
    agent = script(launcher.directory, AGENT, "agent.py")
    line = f"trap 'sleep 1; echo trapped' TERM; {launcher.python} {agent}; echo after"
    launched = launcher.start(line, TORCHRUN_LAUNCHER="none")
    assert [launched.line() for _ in range(3)] == ["ready"] * 3
    launched.stop()
    output = launched.end().out.splitlines()
    assert output == ["saving 15", "saving 15", "agent stopped, ranks left: 0", "trapped", "after"]


def test_kills_ranks_after_their_grace_period(launcher: Launcher) -> None:
    name = script(
        launcher.directory,
        """
        import signal
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        print("ready", flush=True)
        while True: signal.pause()
        """,
    )
    launched = launcher.start(
        [launcher.python, name], TORCHRUN_LAUNCHER="none", TORCHRUN_GRACE_SECONDS="0.2"
    )
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.exit_code == 143
    assert "the grace period is over: killing the remaining processes" in result.err


# Does not end when its ranks have ended.
LASTING_AGENT = """
    import os, signal, subprocess, sys
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    subprocess.Popen([sys.executable, "rank.py"], env=dict(os.environ, LOCAL_RANK="0")).wait()
    os.write(1, b"agent stays\\n")
    open("stays", "w").close()
    while True:
        signal.pause()
"""


# The launcher kills the agent soon after its ranks, but not before the agent has printed that it stays.
SOON = {
    "graceful.py": {
        "_AGENT_SECONDS = 10.0": "_AGENT_SECONDS = 0.5",
        "> _AGENT_SECONDS:": "> _AGENT_SECONDS and os.path.exists('stays'):",
    }
}


@pytest.mark.parametrize(
    ("line", "lines"),
    [
        ("{python} {name}", []),
        ("trap 'sleep 2; echo trapped' TERM; {python} {name}; echo after", ["trapped", "after"]),
    ],
    ids=["alone", "below a trap"],
)
def test_an_agent_that_outlives_its_ranks_is_killed(
    launcher: Launcher, line: str, lines: "list[str]"
) -> None:
    """The trap of a shell runs to its end."""
    script(launcher.directory, RANKS, "rank.py")
    name = script(launcher.directory, LASTING_AGENT, "agent.py")
    command = line.format(python=launcher.python, name=name)
    launched = changed(launcher, SOON).start(command, TORCHRUN_LAUNCHER="none")
    assert launched.line() == "ready"
    launched.stop()
    result = launched.end()
    assert result.out.splitlines() == ["saving 15", "agent stays", *lines]
    assert (result.exit_code, result.message["reason"]) == (143, "Stopped")


def test_leaves_no_process_behind_and_reaps_orphans(launcher: Launcher) -> None:
    name = script(
        launcher.directory,
        """
        import os, subprocess, sys
        first = subprocess.Popen(["sh", "-c", "sleep 1000 & echo $!"], stdout=subprocess.PIPE)
        print(first.stdout.readline().decode().strip(), flush=True)
        first.wait()
        """,
    )
    result = launcher.run([launcher.python, name], TORCHRUN_LAUNCHER="none")
    assert result.exit_code == 0
    await_end(int(result.out))


def test_no_signal_interrupts_the_launcher_between_two_looks(launcher: Launcher) -> None:
    program = """
        import os, signal, sys
        from torchrun_runtime.launch.supervise import SupervisedCommand, supervise
        supervise(SupervisedCommand(["true"], os.environ), None)
        blocked = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        sys.exit(not {signal.SIGTERM, signal.SIGINT, signal.SIGCHLD} <= blocked)
    """
    command = [launcher.python, script(launcher.directory, program)]
    environment = os.environ | {"PYTHONPATH": str(FOLDER.parents[1])}
    ended = subprocess.run(
        command, env=environment, cwd=launcher.directory, timeout=SECONDS, check=False
    )
    assert ended.returncode == 0


def test_a_program_starts_with_default_signals(launcher: Launcher) -> None:
    """Except for signals that the parent of pytest has ignored: all children inherit that."""
    inherited = {n for n in signal.valid_signals() if signal.getsignal(n) is signal.SIG_IGN}
    inherited -= {signal.SIGPIPE, signal.SIGXFSZ}  # Python itself ignores these two
    result = launcher.run(["grep", "^Sig[BI]", "/proc/self/status"])
    blocked, ignored = (
        {number for number in range(1, 32) if int(mask, 16) >> (number - 1) & 1}
        for mask in result.out.split()[1::2]
    )
    assert not blocked
    assert ignored <= inherited
