"""The wait for GPU memory before a later round. Here NVML is a small library with its name."""

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from torchrun_runtime.launch.gpu_memory import LONGEST, NEAR, UNCHANGED, MemoryWait
from unit.runtime.launching import Launcher, changed, script

GIB = 1 << 30


def sequence(*uses: int) -> "list[dict[str, int]]":
    return [{"GPU 0": use} for use in uses]


FALLS_FOR_EVER = sequence(*range(100 * GIB, 0, -GIB))


@pytest.mark.parametrize(
    ("usual", "looks", "seconds", "held"),
    [
        # Before the first round; once a second afterwards; when the wait ends; what is still held.
        (GIB, sequence(GIB), 0, 0),
        (GIB, sequence(GIB + NEAR), 0, 0),
        (GIB, sequence(80 * GIB, 80 * GIB, 80 * GIB, GIB), 3, 0),
        (GIB, sequence(80 * GIB, 60 * GIB, 40 * GIB, 20 * GIB, 10 * GIB, 5 * GIB, 0), 6, 0),
        # Of another process, or kept by the kernel.
        (GIB, sequence(*[9 * GIB] * 30), UNCHANGED, 8 * GIB),
        (GIB, sequence(80 * GIB, *[9 * GIB] * 30), 1 + UNCHANGED, 8 * GIB),
        (GIB, FALLS_FOR_EVER, LONGEST, 84 * GIB),
        # The device cannot be read any more.
        (GIB, [{}], 0, 0),
    ],
)
def test_a_wait_ends_when_memory_is_free_or_does_not_become_free(
    usual: int, looks: "list[dict[str, int]]", seconds: float, held: int
) -> None:
    wait = MemoryWait({"GPU 0": usual}, 0)
    ended = next(second for second, used in enumerate(looks) if not wait.goes_on(used, second))
    assert (ended, sum(wait.held.values())) == (seconds, held)


# NVML_USES has the GiB in use at each look. NVML_LOOKS gets a byte for each look.
NVML = r"""
#include <stdio.h>
#include <stdlib.h>
#define GPU ((void *)0x7f0000000000) /* needs all bits of a pointer */
#define INSTANCE ((void *)0x7f0000000100)
int nvmlInit_v2(void) { return 0; }
int nvmlShutdown(void) { return 0; }
int nvmlDeviceGetCount_v2(unsigned *count) { *count = 2; return 0; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = GPU;
    return index == 0 ? 0 : 4; /* NVML_ERROR_NO_PERMISSION */
}
int nvmlDeviceGetMaxMigDeviceCount(void *device, unsigned *count) {
    *count = getenv("NVML_MIG") ? 7 : 0;
    return 0;
}
int nvmlDeviceGetMigDeviceHandleByIndex(void *device, unsigned index, void **instance) {
    *instance = INSTANCE;
    return index == 3 ? 0 : 6; /* NVML_ERROR_NOT_FOUND */
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long memory[3]) {
    if (device != (getenv("NVML_MIG") ? INSTANCE : GPU)) return 4;
    FILE *looks = fopen(getenv("NVML_LOOKS"), "a");
    fputc('.', looks);
    long count = ftell(looks);
    fclose(looks);
    char *uses = getenv("NVML_USES");
    unsigned long long use = 0;
    while (count--) use = *uses ? strtoull(uses, &uses, 10) : use;
    memory[0] = 139ULL << 30;
    memory[1] = memory[0] - (use << 30);
    memory[2] = use << 30;
    return 0;
}
"""
# Says how many looks there were before each of three rounds.
COMMAND = """
    import os, sys
    print(os.path.getsize(os.environ["NVML_LOOKS"]), flush=True)
    sys.exit(os.environ["TORCHRUN_ROUND"] != "2")
"""
SHORT = {"gpu_memory.py": {"UNCHANGED = 5.0": "UNCHANGED = 0.1", "LINE = 1.0": "LINE = 0.0"}}
WAITED = r"waited \d\.\d s until the GPU memory of the ended ranks was free"
HELD = (
    r"Warning: after \d s more GPU memory is in use than before the first round"
    r" \({}: 79\.0 GiB\)\. The ranks start, and may run out of memory\."
)


@pytest.fixture
def launcher(tmp_path: Path) -> Iterator[Launcher]:
    script(tmp_path, NVML, "nvml.c")
    build = ["cc", "-shared", "-fPIC", "-o", "libnvidia-ml.so.1", "nvml.c"]
    subprocess.run(build, cwd=tmp_path, check=True)
    script(tmp_path, COMMAND, "train.py")
    launcher = changed(Launcher(sys.executable, tmp_path), SHORT)
    yield launcher
    launcher.clear()


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no C compiler")
@pytest.mark.parametrize(
    ("more", "uses", "looks", "lines"),
    [
        # Before the first round, then with the memory of each of two that failed.
        ({}, "1  80 40 1  1", ["1", "4", "5"], [WAITED, WAITED]),
        ({"NVML_MIG": "1"}, "1  80 40 1  1", ["1", "4", "5"], [WAITED, WAITED]),
        ({}, "1  80 80 80", ["1", "3", "4"], [HELD.format("GPU 0"), WAITED]),
        ({"NVML_MIG": "1"}, "1  80 80 80", ["1", "3", "4"], [HELD.format("GPU 0 MIG 3"), WAITED]),
    ],
)
def test_the_next_round_starts_when_memory_is_free(
    launcher: Launcher, more: "dict[str, str]", uses: str, looks: "list[str]", lines: "list[str]"
) -> None:
    result = launcher.run(
        [sys.executable, "train.py"],
        TORCHRUN_LAUNCHER="none",
        TORCHRUN_IN_PLACE_RESTARTS=json.dumps({"restarts": 5, "exitCodes": [], "signals": []}),
        LD_LIBRARY_PATH=str(launcher.directory),
        NVML_LOOKS=str(launcher.directory / "looks"),
        NVML_USES=uses,
        **more,
    )
    assert result.exit_code == 0, result.err
    assert result.out.split() == looks
    said = [line.partition(": ")[2] for line in result.err.splitlines() if "GPU memory" in line]
    assert len(said) == len(lines), result.err
    assert all(re.fullmatch(line, text) for line, text in zip(lines, said, strict=True)), said
