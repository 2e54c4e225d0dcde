"""Bugs in the launcher, beside the user's ranks."""

from functools import partial

from mutants.mutant import Mutant

LAUNCHER = partial(Mutant, package="torchrun_runtime")
_TESTS = "tests/unit/runtime/test_launch"
EPOCH = (f"{_TESTS}_epoch.py",)
PROCESS = (f"{_TESTS}_process.py",)
FAILURE = (f"{_TESTS}_failure.py",)
HANG = (f"{_TESTS}_hang.py",)
SERVED = (f"{_TESTS}_served.py", "tests/unit/runtime/test_delivery.py")

LAUNCHING = (
    LAUNCHER(
        "a-newer-gang-is-not-seen",
        "launch/epoch.py",
        "if seen.attempt > gang.attempt:",
        "if seen.attempt < 0:",
        "the ranks of a gang on a node that was cut off train on beside the next gang",
        EPOCH,
    ),
    LAUNCHER(
        "another-jobs-wait-is-believed",
        "launch/epoch.py",
        "if passed is not None and passed.job == gang.job:",
        "if passed is not None:",
        "a gang starts at once beside ranks that nobody has fenced, on a claim used before",
        EPOCH,
    ),
    LAUNCHER(
        "silent-storage-is-good-storage",
        "launch/epoch.py",
        "elif silence > self._fence:",
        "elif silence > 2**60:",
        "ranks that cannot hear of a newer gang go on for ever",
        EPOCH,
    ),
    LAUNCHER(
        "nobody-is-waited-for",
        "launch/epoch.py",
        "        time.sleep(wait)",
        "        pass",
        "a new gang starts while the old one's fence still runs",
        EPOCH,
    ),
    LAUNCHER(
        "unproven-is-fenced",
        "launch/epoch.py",
        "    if silent:\n        raise _unproven(silent)",
        "    if False:\n        raise _unproven(silent)",
        "workers that never watched are taken for fenced",
        EPOCH,
    ),
    LAUNCHER(
        "the-gate-opens-for-any-attempt",
        "launch/gate.py",
        "return bool(attempt) and annotation(start_file, START) == attempt",
        "return bool(annotation(start_file, START))",
        "a pod starts its ranks by the go-ahead of another gang",
        (*EPOCH, *PROCESS),
    ),
    LAUNCHER(
        "whom-to-fence-is-not-read",
        "launch/gate.py",
        "for word in order.split()[1:]:",
        "for word in order.split()[:0]:",
        "the order to wait for a lost gang is not followed",
        EPOCH,
    ),
    LAUNCHER(
        "orphans-live-on",
        "launch/supervise.py",
        "    _clear()\n",
        "    pass\n",
        "data loaders of a dead rank hold GPU memory and ports for the next try",
        PROCESS,
    ),
    LAUNCHER(
        "grace-has-no-end",
        "launch/supervise.py",
        "return self._deadline is not None and time.monotonic() >= self._deadline",
        "return False",
        "a rank that ignores SIGTERM is cut by the kubelet, and the cause of the end is lost",
        PROCESS,
    ),
    LAUNCHER(
        "memory-is-not-blamed",
        "launch/failure.py",
        "if out_of_memory and number == 9:",
        "if out_of_memory and number == 6:",
        "a rank that the kernel killed for memory was ended by SIGKILL, and nobody knows why",
        FAILURE,
    ),
    LAUNCHER(
        "victims-are-blamed",
        "launch/failure.py",
        "first = min(failures, key=order)",
        "first = max(failures, key=order)",
        "the rank that lost its peer is named, not the one that failed",
        FAILURE,
    ),
    LAUNCHER(
        "the-first-silence-is-a-hang",
        "launch/hang.py",
        "if now - self._stacks_at < min(LAST_CHANCE, self._seconds):\n            return None",
        "pass",
        "a run that goes on after its stacks are written is killed all the same",
        HANG,
    ),
    LAUNCHER(
        "a-manifest-may-lead-out",
        "launch/delivery.py",
        'if entry.path.startswith("/") or ".." in entry.path.split("/"):',
        'if entry.path.startswith("/"):',
        "a serve pod that is not the job's own writes anywhere in the worker",
        SERVED,
    ),
    LAUNCHER(
        "any-workspace-will-do",
        "launch/delivery.py",
        "if digest != server.manifest:",
        "if not digest:",
        "ranks of one gang run different code",
        SERVED,
    ),
)
