"""The checks of the self-test: each reads what is known about its job and decides. Pure.

Their texts go into a report for others. They have reasons, numbers and words of this file, and no
message of the cluster, which may have names.
"""

from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Literal, NamedTuple, TypeAlias

from kubectl_torchrun.cluster.summary import describe_network
from kubectl_torchrun.selftest.facts import SAVED_STEP, JobRecord, RankFact, known_reason, plain
from kubectl_torchrun.text import human

Verdict = Literal["passed", "failed", "skipped"]
_KILLED = 9  # SIGKILL
_KEPT_BYTES = 256 << 20  # GPU memory that may differ between two starts
_TORCH_MISSING = (
    "The image of the queue has no torch. Select a queue whose image has it, with --queue"
)


class Bandwidth(NamedTuple):
    """An all-reduce of one size. Bandwidths in GB/s, as nccl-tests defines them."""

    bytes: int
    seconds: float
    algorithm: float
    bus: float
    correct: bool


class Judgement(NamedTuple):
    """What a check has found. seen: what else is known. seconds: until ranks train again.

    faults: why it has failed. skipped: why it does not apply, or was not made.
    """

    faults: Sequence[str] = ()
    seen: str = ""
    seconds: float | None = None
    skipped: str = ""
    sizes: tuple[Bandwidth, ...] = ()


class Check(NamedTuple):
    """A check of a job."""

    name: str
    title: str
    expected: str
    judge: Callable[[JobRecord], Judgement]


class CheckResult(NamedTuple):
    """A check that was made or skipped."""

    check: Check
    found: Judgement

    @property
    def verdict(self) -> Verdict:
        """Whether it has passed."""
        return "skipped" if self.found.skipped else "failed" if self.found.faults else "passed"

    @property
    def text(self) -> str:
        """Why it has not passed, and what was seen."""
        return "; ".join(part for part in (self.reason, self.found.seen) if part)

    @property
    def reason(self) -> str:
        """Why it has not passed; empty if it has."""
        return self.found.skipped or "; ".join(self.found.faults)


Job: TypeAlias = tuple[Check, ...]


def judge(job: Job, run: JobRecord) -> list[CheckResult]:
    """The results of the checks that read this job."""
    return [CheckResult(check, check.judge(run)) for check in job]


def skip(job: Job, why: str) -> list[CheckResult]:
    """The results of checks that were not made."""
    return [CheckResult(check, Judgement(skipped=why)) for check in job]


def _bandwidth(run: JobRecord) -> Judgement:
    ranks = max(run.versions.world, 1)
    sizes = tuple(_bandwidth_of(event, ranks) for event in run.of("bandwidth"))
    wrong = [human(size.bytes) for size in sizes if not size.correct]
    faults = [f"wrong sums at {', '.join(wrong)}"] if wrong else []
    if not sizes:
        faults = ["no size was measured"]
    best = max(sizes, key=lambda size: size.bus, default=None)
    seen = f"up to {best.bus:.2f} GB/s bus bandwidth, at {human(best.bytes)}" if best else ""
    return Judgement([*_failures(run), *faults], seen, sizes=sizes)


def _bandwidth_of(event: RankFact, ranks: int) -> Bandwidth:
    algorithm = event.bytes / max(event.seconds, 1e-9) / 1e9
    bus = algorithm * 2 * (ranks - 1) / ranks
    return Bandwidth(event.bytes, event.seconds, algorithm, bus, event.correct)


def _transport(run: JobRecord) -> Judgement:
    versions, nodes = run.versions, run.status.num_nodes or 0
    if not versions.backend:
        return Judgement(skipped="no rank has told its backend")
    if versions.backend != "nccl":
        return Judgement(seen=f"{plain(versions.backend)} over TCP")
    if nodes < 2:
        return Judgement(skipped="one node has no network between its ranks")
    seen = ", ".join(plain(describe_network(use)) or "an unknown one" for use in run.network)
    known = sum(use.nodes for use in run.network)
    faults = [f"the network of {nodes - known} of {nodes} nodes is unknown"] * (known != nodes)
    if run.slow:
        faults.append(f"SlowNetwork is True: {known_reason(run.slow)}")
    return Judgement(faults, seen)


def _kill(run: JobRecord) -> Judgement:
    again, failure = run.second_start(), run.status.last_failure
    faults = [*_failures(run), *_resume_faults(again, SAVED_STEP)]
    if again and again[0].attempt:
        faults.append("a new gang started, and not the ranks in the same pods")
    cause = "no root cause"
    if failure is not None:
        signal = f"signal {failure.signal}" if failure.signal else f"exit code {failure.exit_code}"
        cause = f"root cause: rank {failure.rank}, {signal}"
        if (failure.rank, failure.signal) != (run.odd, _KILLED):
            faults.append(f"the root cause is not rank {run.odd} with signal {_KILLED}")
    else:
        faults.append("the status has no root cause")
    return Judgement(faults, f"{_start(again)}; {cause}", _seconds_on_machine(run, again))


def _memory(run: JobRecord) -> Judgement:
    free = {
        is_first: {
            e.rank: e.free for e in run.of("start") if e.free and (e.start == (0, 0)) is is_first
        }
        for is_first in (True, False)
    }
    if not free[True]:
        return Judgement(skipped="the ranks have no GPUs")
    if not free[False]:
        return Judgement(skipped="the ranks did not start again")
    less = {rank: before - free[False].get(rank, 0) for rank, before in free[True].items()}
    rank = max(less, key=lambda rank: less[rank])
    seen = f"at most {human(max(less[rank], 0))} less than before, on rank {rank}"
    faults = [f"a killed rank has kept {human(less[rank])}"] * (less[rank] > _KEPT_BYTES)
    return Judgement(faults, seen)


def _delete(run: JobRecord) -> Judgement:
    again = run.second_start()
    faults = [*_failures(run), *_resume_faults(again, SAVED_STEP)]
    if run.status.restarts:
        faults.append("the deletion counts as a failure towards maxRestarts")
    return Judgement(faults, _start(again), _seconds_after(run, "deleted", again))


def _hang(run: JobRecord) -> Judgement:
    again, failure = run.second_start(), run.status.last_failure
    faults = [*_failures(run), *_resume_faults(again, SAVED_STEP)]
    reason = known_reason(failure.reason) if failure else "none"
    if reason != "Hung":
        faults.append(f"the reason of the failure is {reason}")
    if run.still != {run.odd}:
        ranks = ", ".join(map(str, sorted(run.still))) or "no rank"
        faults.append(f"the stacks show that {ranks} hangs, and not rank {run.odd}")
    seen = f"{_start(again)}; reason {reason}; stacks of {run.stacks} ranks"
    return Judgement(faults, seen, _seconds_on_machine(run, again))


def _stop(run: JobRecord) -> Judgement:
    again, stopped = run.second_start(), run.of("stopped")
    steps = sorted({event.step for event in stopped})
    ranks = run.versions.world
    faults = [*_failures(run)]
    if len(stopped) != ranks or len(steps) != 1:
        told = ", ".join(map(str, steps)) or "none"
        faults.append(f"{len(stopped)} of {ranks} ranks have stopped with a checkpoint, at: {told}")
    else:
        faults += _resume_faults(again, steps[0])
    at = f"all ranks stopped at step {steps[0]}; " if len(steps) == 1 else ""
    return Judgement(faults, at + _start(again), _seconds_after(run, "resumed", again))


def _failures(run: JobRecord) -> list[str]:
    """Why the job has not succeeded."""
    phase, reason = run.status.phase, run.status.reason
    if phase == "Succeeded":
        return []
    if reason == "TorchMissing":
        return [_TORCH_MISSING]
    because = f" ({known_reason(reason)})" if reason else ""
    now = f"the job is {known_reason(phase or 'New')}{because}"
    return [f"{run.why}: {now}" if run.why else now]


def _resume_faults(again: Sequence[RankFact], expected: int) -> list[str]:
    starts = sorted({event.step for event in again if event.kind == "start"})
    if not starts:
        return ["the ranks did not start again"]
    if starts != [expected]:
        return [f"the ranks resumed from step {', '.join(map(str, starts))}, not {expected}"]
    steps = {event.step for event in again if event.kind == "step"}
    return [] if steps == {expected + 1} else [f"the first step was not {expected + 1}"]


def _start(again: Sequence[RankFact]) -> str:
    """How the ranks have started again."""
    steps = [event.step for event in again if event.kind == "start"]
    if not steps:
        return "no other start"
    where = "a new gang" if again[0].attempt else "the same pods"
    return f"{where}, resumed from step {steps[0]}"


def _seconds_on_machine(run: JobRecord, again: Sequence[RankFact]) -> float | None:
    """From the fault to the first step, by the clock of the machine of the odd rank.

    A new gang may run on another machine, so the clock of this program counts then.
    """
    broken = [event for event in run.of("breaks") if event.rank == run.odd]
    first = [event for event in again if event.kind == "step" and event.rank == run.odd]
    if not broken or not first:
        return None
    if first[0].attempt:
        return first[0].at - broken[0].at
    return first[0].time - broken[0].time


def _seconds_after(run: JobRecord, act: str, again: Sequence[RankFact]) -> float | None:
    """From a request of the plugin to the first step, by the clock of this program."""
    first = [event.at for event in again if event.kind == "step"]
    return first[0] - run.acts[act] if first and act in run.acts else None


_FROM_CHECKPOINT = f"a restart from step {SAVED_STEP}"
_BANDWIDTH = Check("bandwidth", "All-reduce", "the right sum at each size", _bandwidth)
_TRANSPORT = Check(
    "transport",
    "Network",
    "the transport of each node in status.network, without SlowNetwork; gloo uses TCP",
    _transport,
)
_KILL = Check(
    "kill",
    "Killed rank",
    f"{_FROM_CHECKPOINT} in the same pods; the root cause is the last rank with signal {_KILLED}",
    _kill,
)
_MEMORY = Check(
    "memory", "GPU memory of the killed rank", f"free but for {human(_KEPT_BYTES)}", _memory
)
_DELETE = Check("delete", "Deleted pod", f"{_FROM_CHECKPOINT}, not counted as a failure", _delete)
_HANG = Check(
    "hang", "Hung rank", f"reason Hung, stacks that show the rank, and {_FROM_CHECKPOINT}", _hang
)
_STOP = Check(
    "stop",
    "Suspension and resume",
    "all ranks stop with a checkpoint of the same step, and go on with the next one",
    _stop,
)
# By the argument of workspace/train.py. NCCL tells its network after some seconds of training.
JOBS: Mapping[str, Job] = MappingProxyType(
    {
        "bandwidth": (_BANDWIDTH,),
        "kill": (_TRANSPORT, _KILL, _MEMORY),
        "delete": (_DELETE,),
        "hang": (_HANG,),
        "stop": (_STOP,),
    }
)
