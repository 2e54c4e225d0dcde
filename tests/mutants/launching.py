"""Bugs in the launcher."""

from functools import partial

from mutants.mutant import Mutant

LAUNCHER = partial(Mutant, package="torchrun_runtime")
_TESTS = "tests/unit/runtime/launch/test"
FENCING = (f"{_TESTS}_fencing.py", f"{_TESTS}_fencing_same_worker.py")
SUPERVISE = (f"{_TESTS}_supervise.py", f"{_TESTS}_supervise_signals.py")
GATE = (f"{_TESTS}_gate.py",)
FAILURE = (f"{_TESTS}_failure.py",)
HANG = (f"{_TESTS}_hang.py",)
SERVED = (f"{_TESTS}_served.py", f"{_TESTS}_delivery.py")

LAUNCHING = (
    LAUNCHER(
        "a-newer-gang-is-not-seen",
        "launch/fencing.py",
        "if latest.attempt > gang.attempt:",
        "if latest.attempt < 0:",
        "the ranks of a gang on a node that was cut off train on beside the next gang",
        FENCING,
    ),
    LAUNCHER(
        "another-jobs-wait-is-believed",
        "launch/fencing.py",
        "if passed_gang is not None and passed_gang.job == gang.job:",
        "if passed_gang is not None:",
        "a gang starts at once beside ranks that nobody has fenced, on a claim used before",
        FENCING,
    ),
    LAUNCHER(
        "silent-storage-is-good-storage",
        "launch/fencing.py",
        "elif silence > self._fence:",
        "elif silence > 2**60:",
        "ranks that cannot hear of a newer gang go on for ever",
        FENCING,
    ),
    LAUNCHER(
        "nobody-is-waited-for",
        "launch/fencing.py",
        "        time.sleep(wait)",
        "        pass",
        "a new gang starts while the old one's fence still runs",
        FENCING,
    ),
    LAUNCHER(
        "unproven-is-fenced",
        "launch/fencing.py",
        "    if unregistered:\n        raise _fence_unproven(unregistered)",
        "    if False:\n        raise _fence_unproven(unregistered)",
        "workers that never watched are taken for fenced",
        FENCING,
    ),
    LAUNCHER(
        "an-earlier-pod-proves-the-fence",
        "launch/fencing.py",
        "    if not may_be_registered:\n",
        "    if state:\n",
        "a pod that does not watch is taken for fenced, because an earlier pod of its index watched",
        FENCING,
    ),
    LAUNCHER(
        "the-gate-opens-for-any-attempt",
        "launch/gate.py",
        "return bool(attempt) and annotation(start_file, START_ANNOTATION) == expected",
        "return bool(annotation(start_file, START_ANNOTATION))",
        "a pod starts its ranks by the go-ahead of another gang",
        (*FENCING, *GATE),
    ),
    LAUNCHER(
        "the-workers-to-fence-are-not-read",
        "launch/gate.py",
        "for word in order.split()[1:]:",
        "for word in order.split()[:0]:",
        "the order to wait for a lost gang is not followed",
        FENCING,
    ),
    LAUNCHER(
        "orphans-live-on",
        "launch/supervise.py",
        "has_survivors = not _clear()",
        "has_survivors = False",
        "data loaders of a dead rank hold GPU memory and ports for the next try",
        SUPERVISE,
    ),
    LAUNCHER(
        "grace-has-no-end",
        "launch/supervise.py",
        "return self._deadline is not None and time.monotonic() >= self._deadline",
        "return False",
        "a rank that ignores SIGTERM is cut by the kubelet, and the cause of the end is lost",
        SUPERVISE,
    ),
    LAUNCHER(
        "memory-is-not-blamed",
        "launch/failure.py",
        "if out_of_memory and number == _SIGKILL:",
        "if out_of_memory and number == 6:",
        "a rank that the kernel killed for memory was killed by SIGKILL, and nobody knows why",
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
