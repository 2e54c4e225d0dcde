"""GPU memory that ended ranks still hold, and that the next round in the same pods needs.

The driver may free the GPU memory of a killed process some time after the process has ended. Ranks
that start before that run out of memory. So a node remembers how much memory each of its devices
has in use before the first round, and waits before every later one until the use is near that.

NVML (https://docs.nvidia.com/deploy/nvml-api/) does not say whose memory it is: it has the process
IDs of the machine, not those of the container. Other processes count if a device is shared, as with
time slicing. On GPUs that are NUMA nodes, such as GH200, the kernel keeps the pages of ended
processes until somebody needs them. So a wait also ends once the use has not become less for some
seconds. What is in use then counts as usual: the next round does not wait for it again.
"""

from __future__ import annotations

import ctypes
import math
import time
from contextlib import contextmanager, suppress
from typing import Callable, Iterator, Mapping

from .output import say
from .threads import begin, within

# Bytes in use, by the name of the device.
Usage = Mapping[str, int]

_LIBRARY = "libnvidia-ml.so.1"
NEAR = 128 << 20  # bytes above the usual; the context of one CUDA process takes more
LONGEST = 15.0  # seconds of a wait
UNCHANGED = 5.0  # seconds without less memory in use that end a wait
_POLL = 0.2
_WORTH_A_LINE = 1.0  # seconds of a wait that succeeded
_ANSWER_SECONDS = 10.0  # for NVML, which may block on a broken GPU


class MemoryWait:
    """Decides how long a round waits. Pure: call `goes_on` with each look, until it is False.

    usual: the use before the first round. now: the time of the start, in seconds.
    """

    def __init__(self, usual: Usage, now: float) -> None:
        self.held: Usage = {}  # at the last look: bytes above the usual
        self._usual = usual
        self._start = now
        self._least: float = math.inf
        self._least_at = now

    def goes_on(self, used: Usage, now: float) -> bool:
        """Whether the round waits on."""
        above = {name: used[name] - usual for name, usual in self._usual.items() if name in used}
        self.held = {name: size for name, size in above.items() if size > NEAR}
        total = sum(self.held.values())
        if total < self._least:
            self._least, self._least_at = total, now
        is_over = now - self._start >= LONGEST or now - self._least_at >= UNCHANGED
        return bool(self.held) and not is_over


class GpuMemory:
    """Waits for the memory of this node's GPUs. Create it before any rank runs.

    Without NVML nothing waits, and nothing is said.
    """

    def __init__(self) -> None:
        self._first = begin(_use_once)
        self._usual: Usage | None = None

    def await_free(self) -> None:
        """Return once ranks may start; for the first round at once. Takes at most 25 s."""
        try:
            if self._usual is None:
                self._usual = within(_ANSWER_SECONDS, self._first.result)
            elif self._usual:
                within(LONGEST + _ANSWER_SECONDS, self._await_usual)
        except Exception as error:  # no reason to end a job
            say(f"no round waits until GPU memory is free, because NVML fails: {error}")
            self._usual = {}

    def _await_usual(self) -> None:
        assert self._usual is not None
        start = time.monotonic()
        wait = MemoryWait(self._usual, start)
        with _opened_nvml() as read:
            while wait.goes_on(used := read(), time.monotonic()):
                time.sleep(_POLL)
        seconds = time.monotonic() - start
        if wait.held:
            self._usual = {**self._usual, **{name: used[name] for name in wait.held}}
            say(describe_held(wait.held, seconds))
        elif seconds >= _WORTH_A_LINE:
            say(f"waited {seconds:.1f} s until the GPU memory of the ended ranks was free")


def describe_held(held: Usage, seconds: float) -> str:
    """The line of a wait that ended without free memory."""
    each = ", ".join(f"{name}: {size / (1 << 30):.1f} GiB" for name, size in held.items())
    return (
        f"Warning: after {seconds:.0f} s more GPU memory is in use than before the first round"
        f" ({each}). The ranks start, and may run out of memory."
    )


def _use_once() -> Usage:
    with _opened_nvml() as read:
        return read()


@contextmanager
def _opened_nvml() -> Iterator[Callable[[], Usage]]:
    """A function that returns the present use; an empty one without NVML."""
    try:
        library = ctypes.CDLL(_LIBRARY)
        is_open = library.nvmlInit_v2() == 0
    except (OSError, AttributeError):
        is_open = False
    if not is_open:
        yield dict
        return
    try:
        devices = _devices(library)
        yield lambda: _read(library, devices)
    finally:
        library.nvmlShutdown()


class _Memory(ctypes.Structure):
    """nvmlMemory_t, in bytes."""

    _fields_ = (
        ("total", ctypes.c_ulonglong),
        ("free", ctypes.c_ulonglong),
        ("used", ctypes.c_ulonglong),
    )


def _devices(library: ctypes.CDLL) -> dict[str, ctypes.c_void_p]:
    """The handles of all devices that this container may use; MIG instances instead of their GPU.

    Only a privileged process can read the use of a whole GPU in MIG mode.
    """
    count, devices = ctypes.c_uint(), {}
    library.nvmlDeviceGetCount_v2(ctypes.byref(count))
    for index in range(count.value):
        device = ctypes.c_void_p()
        if library.nvmlDeviceGetHandleByIndex_v2(index, ctypes.byref(device)) == 0:
            instances = _instances(library, device)
            for number, instance in instances.items():
                devices[f"GPU {index} MIG {number}"] = instance
            if not instances:
                devices[f"GPU {index}"] = device
    return devices


def _instances(library: ctypes.CDLL, device: ctypes.c_void_p) -> dict[int, ctypes.c_void_p]:
    count, instances = ctypes.c_uint(), {}
    with suppress(AttributeError):  # drivers before MIG
        library.nvmlDeviceGetMaxMigDeviceCount(device, ctypes.byref(count))
    for number in range(count.value):
        instance = ctypes.c_void_p()
        get = library.nvmlDeviceGetMigDeviceHandleByIndex
        if get(device, number, ctypes.byref(instance)) == 0:
            instances[number] = instance
    return instances


def _read(library: ctypes.CDLL, devices: Mapping[str, ctypes.c_void_p]) -> Usage:
    """The use of the devices that can be read."""
    used, memory = {}, _Memory()
    for name, device in devices.items():
        if library.nvmlDeviceGetMemoryInfo(device, ctypes.byref(memory)) == 0:
            used[name] = memory.used
    return used
