"""How each form of a command is run. Users can look up their own command in the table."""

import shlex

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_runtime.launch.cause import LaunchError
from torchrun_runtime.launch.command import SHELL, Run, decide, only_program

PYTHON = "/usr/bin/python3"


def decided(command: str | list[str], launcher: str = "auto", nnodes: str = "2") -> Run:
    return decide(command, launcher, nnodes, PYTHON)


UNDER_TORCHRUN = {
    "python train.py --lr 1e-3": "exec python train.py --lr 1e-3",
    "  python3 train.py\n": "exec python3 train.py",
    "python3.11 -m pkg.train": "exec python3.11 -m pkg.train",
    "/opt/conda/bin/python -u train.py": "exec /opt/conda/bin/python -u train.py",
    "train.py --lr $LR": f"exec {PYTHON} train.py --lr $LR",
    "./src/train.py": f"exec {PYTHON} ./src/train.py",
    "FOO=1 python train.py": "exec env FOO=1 python train.py",
    "FOO='a b' BAR=\"$X\" train.py": f"exec env FOO='a b' BAR=\"$X\" {PYTHON} train.py",
    "python train.py --sep ';' --pipe \"a|b\"": "exec python train.py --sep ';' --pipe \"a|b\"",
    "python train.py \\\n  --epochs 3": "exec python train.py \\\n  --epochs 3",
    "python train.py --deepspeed ds.json": "exec python train.py --deepspeed ds.json",
    "python train.py --run-name torchrun-test": "exec python train.py --run-name torchrun-test",
    "python train.py --data $DATA/*.bin": "exec python train.py --data $DATA/*.bin",
    "python train_accelerate.py": "exec python train_accelerate.py",
}
ARGUMENTS = [
    "python train.py --strategy deepspeed",
    "python train.py --output /ckpt/deepspeed --name torchrun",
    "python -u train.py deepspeed",
    "python3 -u -X dev -W ignore train.py --strategy deepspeed",
    "python -Xdev -Wignore -Bum pkg.train accelerate",
    "python --check-hash-based-pycs never -- train.py torchrun",
    "python $FLAGS ${MORE} train.py --strategy deepspeed",
    "python -mpkg.train -m deepspeed",
    "python -c 'import train' torchrun",
    "python -u",
    "python train.py # don't use deepspeed",
]
UNDER_TORCHRUN.update({line: f"exec {line}" for line in ARGUMENTS})
UNDER_TORCHRUN["train.py --strategy deepspeed"] = f"exec {PYTHON} train.py --strategy deepspeed"
UNDER_TORCHRUN["train.py deepspeed"] = f"exec {PYTHON} train.py deepspeed"


@pytest.mark.parametrize("line", UNDER_TORCHRUN)
def test_runs_a_plain_python_line_under_torchrun(line: str) -> None:
    run = decided(line)
    assert run.under_torchrun
    assert run.argv == [SHELL, "-c", UNDER_TORCHRUN[line]]
    assert decided(line, "torchrun") == run


AS_IT_IS = [
    "torchrun train.py",
    "/opt/conda/bin/torchrun --nproc-per-node 8 train.py",
    "cd src && torchrun train.py",
    "python -m torch.distributed.run train.py",
    "python3 -m torch.distributed.launch --use-env train.py",
    "python -m accelerate.commands.launch train.py",
    "accelerate launch train.py",
    "deepspeed train.py",
    "python /opt/conda/bin/torchrun train.py",
    "python $(which torchrun) train.py",
    'python "$(which torchrun)" train.py',
    "python `which torchrun` train.py",
    "python -X dev -W ignore /opt/conda/bin/torchrun train.py",
    "python -W ignore -m deepspeed train.py",
    "python --check-hash-based-pycs never -m deepspeed train.py",
    "python -um torch.distributed.run train.py",
    "python -mtorch.distributed.run train.py",
    "python $FLAGS -m torch.distributed.run train.py",
    "python -m debugpy --listen 5678 -m torch.distributed.run train.py",
    "python -m debugpy --listen 5678 -m accelerate.commands.launch train.py",
    "python -m cProfile -o profile /opt/conda/bin/torchrun train.py",
    'python -m pdb "$(which torchrun)" train.py',
    "OMP_NUM_THREADS=1 torchrun train.py",
    "python prepare.py; python train.py",
    "python prepare.py\npython train.py",
    "# don't lose the cache\npython train.py",
    "python prepare.py # don't\npython train.py # isn't long",
    "cat > notes <<EOF\nit's\nEOF\npython train.py",
    "cat > notes <<EOF\nit's\nEOF\ntorchrun train.py",
    "python train.py &",
    "(python train.py)",
    "bash run.sh",
    "./train.sh --strategy deepspeed",
    "VAR=1 bash -c 'python train.py'",
    "python prepare.py && python train.py",
    "for x in 1 2; do python train.py $x; done",
    "python train.py |& tee log",
    "python train.py &> log",
    "python train.py | grep loss",
    "uv run torchrun train.py",
    "env A=1 torchrun train.py",
    "nsys profile torchrun train.py",
    "uv run lightning fit train.py",
    "uv run --isolated tool train.py",
    "uv run -m pkg.train",
    "poetry install",
    "nvidia-smi",
    "pythonic train.py",
    "FOO=1",
    "# no command",
    "ray start --head",
]


@pytest.mark.parametrize("line", AS_IT_IS)
def test_runs_every_other_line_as_it_is(line: str) -> None:
    run = decided(line)
    assert not run.under_torchrun
    assert run.argv == [SHELL, "-c", line]
    assert run.why


# Before the command, the command in each rank, after it; and whether torch is in an environment.
AROUND = {
    "uv run train.py": ("uv run ", f"{PYTHON} train.py", "", True),
    "uv run python train.py --x 'a b'": ("uv run ", "python train.py --x 'a b'", "", True),
    "uv run --with x --no-sync t.py": ("uv run --with x --no-sync ", f"{PYTHON} t.py", "", True),
    "poetry run python -m pkg": ("poetry run ", "python -m pkg", "", True),
    "conda run -n env python t.py": ("conda run -n env ", "python t.py", "", True),
    "nsys profile -o out python t.py": ("nsys profile -o out ", "python t.py", "", False),
    "numactl -N 0 python t.py": ("numactl -N 0 ", "python t.py", "", False),
    "time python t.py": ("time ", "python t.py", "", False),
    "stdbuf -oL python -u t.py": ("stdbuf -oL ", "python -u t.py", "", False),
    "exec python t.py": ("exec ", "python t.py", "", False),
    "cd src && python t.py": ("cd src && ", "python t.py", "", False),
    "cd $DIR/src && python t.py > $LOG": ("cd $DIR/src && ", "python t.py", " > $LOG", False),
    "cd a && cd 'b c' && FOO=1 uv run t.py": (
        *("cd a && cd 'b c' && FOO=1 uv run ", f"{PYTHON} t.py", "", True),
    ),
    "python t.py 2>&1": ("", "python t.py", " 2>&1", False),
    "python t.py>log": ("", "python t.py", ">log", False),
    "FOO=1 python t.py < in.txt > log": ("FOO=1 ", "python t.py", " < in.txt > log", False),
    "python t.py | tee log": ("", "python t.py", " | tee log", False),
    "python t.py \\\n  | tee log": ("", "python t.py", " \\\n  | tee log", False),
    "cd s && python t.py --strategy deepspeed 2>&1 | tee -a 'l g' > x": (
        *("cd s && ", "python t.py --strategy deepspeed", " 2>&1 | tee -a 'l g' > x", False),
    ),
    "python t.py --sep '|' \"> x\" > log": ("", "python t.py --sep '|' \"> x\"", " > log", False),
}


@pytest.mark.parametrize("line", AROUND)
def test_what_stands_around_a_command_runs_once_for_each_node(line: str) -> None:
    run = decided(line)
    assert run.under_torchrun
    before, inner, after, in_environment = AROUND[line]
    assert run.argv == [SHELL, "-c", f"exec {inner}"]
    assert (run.before, run.after, run.in_environment) == (before, after, in_environment)


@pytest.mark.parametrize(
    "line",
    ["python t.py --name $(date +%s)", "cd src && python t.py `cat args` | tee log"],
)
def test_a_line_with_values_of_other_commands_runs_in_each_rank(line: str) -> None:
    run = decided(line)
    assert (run.under_torchrun, run.argv) == (True, [SHELL, "-c", line])
    assert (run.before, run.after) == ("", "")


@pytest.mark.parametrize(
    "line",
    [
        "cd src && python train.py --strategy deepspeed",
        "./train.sh --strategy deepspeed --nnodes 7 --standalone",
        "torchrun train.py --nnodes 7 --standalone",
        "bash -c 'x' torch --launcher accelerate",
    ],
)
def test_an_argument_is_no_launcher(line: str) -> None:
    starts = "torchrun " in line
    assert decided(line, "auto" if starts else "torchrun").under_torchrun != starts


@pytest.mark.parametrize(
    ("command", "under_torchrun", "argv"),
    [
        (["python", "t.py", "; rm -rf /"], True, ["python", "t.py", "; rm -rf /"]),
        (["t.py", "$HOME"], True, [PYTHON, "t.py", "$HOME"]),
        (["python", "t.py", "deepspeed"], True, ["python", "t.py", "deepspeed"]),
        (["t.py", "--strategy", "deepspeed"], True, [PYTHON, "t.py", "--strategy", "deepspeed"]),
        (["torchrun", "t.py"], False, ["torchrun", "t.py"]),
        (["sh", "-c", "torchrun t.py"], False, ["sh", "-c", "torchrun t.py"]),
        (["python", "-m", "torch.distributed.run", "t.py"], False, None),
        (["FOO=1", "python"], False, None),
        (["nvidia-smi"], False, None),
    ],
)
def test_a_command_list_is_not_parsed(
    command: list[str], under_torchrun: bool, argv: list[str] | None
) -> None:
    run = decided(command)
    assert run.under_torchrun == under_torchrun
    assert run.argv == (argv or command)


WORDS = st.text(st.characters(exclude_characters="\0"), max_size=8)
LAUNCHERS = st.sampled_from(["torchrun", "accelerate", "/ckpt/deepspeed", "a torchrun b", "-m"])


@given(st.lists(WORDS | LAUNCHERS, max_size=4))
def test_quoted_words_never_change_how_a_line_is_run(words: list[str]) -> None:
    run = decided("python train.py " + shlex.join(words))
    inner = shlex.split(run.argv[2])
    assert inner[-len(words) :] == words or not words
    assert run.under_torchrun


@pytest.mark.parametrize("line", ["python train.py", "# don't\npython train.py"])
def test_launcher_none_runs_everything_as_it_is(line: str) -> None:
    assert decided(line, "none") == Run([SHELL, "-c", line], False, "spec.launcher is none")


@pytest.mark.parametrize("line", ["cd src && python train.py", "# don't\npython train.py"])
def test_launcher_torchrun_runs_any_line_under_torchrun(line: str) -> None:
    run = decided(line, "torchrun")
    assert run.under_torchrun
    assert run.argv == [SHELL, "-c", line]


@pytest.mark.parametrize(
    ("command", "launcher", "nnodes", "named"),
    [
        ("torchrun --nnodes 4 t.py", "auto", "2", ("4", "2")),
        ("torchrun --nnodes=1:4 t.py", "none", "2", ("1:4", "2")),
        ("cd x && python -m torch.distributed.run --nnodes=1 t.py", "auto", "1:4", ("1", "1:4")),
        (["torchrun", "--nnodes", "3", "t.py"], "auto", "2", ("3", "2")),
        ("torchrun --nnodes=two t.py", "auto", "2", ("two", "2")),
        ("torchrun --standalone t.py", "auto", "2", ("--standalone", "2")),
        ("torchrun t.py", "torchrun", "2", ("torchrun", "auto")),
        ("python prepare.py && torchrun t.py", "torchrun", "2", ("torchrun", "auto")),
        ("env A=1 torchrun t.py", "torchrun", "2", ("torchrun", "auto")),
        ("python 'unfinished", "auto", "2", ("No closing quotation",)),
        ("python 'unfinished # it", "none", "2", ("No closing quotation",)),
        ("cat <<E\nit's\nE\ntorchrun --nnodes=4 t.py", "auto", "2", ("4", "2")),
    ],
)
def test_refuses_a_command_that_contradicts_the_job(
    command: str | list[str], launcher: str, nnodes: str, named: tuple[str, ...]
) -> None:
    with pytest.raises(LaunchError) as failure:
        decided(command, launcher, nnodes)
    assert failure.value.reason == "InvalidCommand"
    assert all(word in failure.value.message for word in named)


@pytest.mark.parametrize(
    ("command", "nnodes"),
    [
        ("torchrun --nnodes 2 t.py", "2"),
        ("torchrun --nnodes=2:2 t.py", "2"),
        ("torchrun --nnodes=$NNODES t.py", "2"),
        ("torchrun --nnodes=7 t.py", ""),
        ("torchrun --standalone t.py", "1"),
        ("python t.py --nnodes 7", "2"),
        ("torchrun t.py # not --standalone", "2"),
        ("python t.py torchrun --nnodes 7 --standalone", "2"),
    ],
)
def test_accepts_a_command_that_repeats_the_job(command: str, nnodes: str) -> None:
    assert decided(command, nnodes=nnodes)


@pytest.mark.parametrize(
    ("line", "program"),
    [
        (" bash run.sh\n", "bash"),
        ("./run.sh $X # notes", "./run.sh"),
        *((line, "") for line in ("bash run.sh; date", "A=1 bash run.sh", "$RUN", ". run.sh", "#")),
        *((line, "") for line in ("exit 3", "cd /", "time bash run.sh", "source run.sh")),
    ],
)
def test_one_program_is_told_from_other_lines(line: str, program: str) -> None:
    assert only_program(line) == program


@pytest.mark.parametrize(
    ("command", "script"),
    [
        ("python train.py", "train.py"),
        ("python -u -W ignore 'my train.py' --config x.py", "my train.py"),
        ("train.py a", "train.py"),
        (["python3", "src/train.py"], "src/train.py"),
        ("A=1 python train.py", "train.py"),
        ("uv run train.py 2>&1 | tee log", "train.py"),
        # What is not certain:
        ("cd src && python train.py", ""),
        ("uv run --directory src python train.py", ""),
        ("python -m pkg.py", ""),
        ("python -c 'import x.py'", ""),
        ("python $SCRIPT.py", ""),
        ("python src/*.py", ""),
        ("python main --config x.py", ""),
        ("bash train.sh", ""),
    ],
)
def test_the_script_is_known_where_it_is_certain(command: str | list[str], script: str) -> None:
    assert decided(command).script == script
