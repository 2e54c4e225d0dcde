"""Shares of a profile by purpose and by function, from py-spy's collapsed stacks."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

import msgspec

from torchrun_bench.report import RESULTS

PROFILES = RESULTS / "profiles.json"
MOST = 15  # functions
REST = "event loop and the rest"
# The innermost frame that matches a pattern decides: a log line of a reconciler is a log line.
Purposes = Sequence[tuple[str, str]]
CONTROLLER: Purposes = (
    ("short requests", r"client/(session|pool|http1|apply|responses)\.py"),
    ("log lines", r"structlog|logging/__init__|torchrun_controller/logs\.py"),
    ("metrics", r"prometheus_client|torchrun_controller/metrics/"),
    ("events", r"client/events\.py"),
    ("observe", r"cache/observe\.py"),
    ("reconcile", r"torchrun_controller/reconcile/"),
    ("watches and caches", r"torchrun_controller/(cache|watch)/|aiohttp"),
    ("work queue and controllers", r"torchrun_controller/(workqueue\.py|controllers/)"),
)
CHURN: Purposes = (
    ("decoding of frames", r"watch/codec\.py|msgspec"),
    ("splitting of bytes into lines", r"watch/lines\.py"),
    ("sharing of repeated strings", r"watch/sharing\.py"),
    ("store and indexes", r"cache/(store|observe|job_keys)\.py"),
    ("work queue", r"workqueue\.py"),
    ("informer and watch", r"torchrun_controller/(cache|watch)/"),
)
# An idle thread, which py-spy takes for a busy one on some machines.
_IDLE = re.compile(r"(^|;)wait \([^;]*threading\.py[^;]*$")
# Every stack starts with these.
_OUTERMOST = re.compile(
    r"^(<module>|run|main|_run_code|_run_module_as_main|_run_coro|Runner\.run|AsyncIOBackend\.run"
    r"|TaskHandle\._run_coro|Controller\.run|BaseEventLoop\.\w+|Handle\._run|side) "
)


class Profile(msgspec.Struct, frozen=True):
    """Shares of the samples. `cumulative` has the callees of each function, `own` has not."""

    title: str
    commit: str
    samples: int
    purposes: dict[str, float]
    own: dict[str, float]
    cumulative: dict[str, float]


def busy(collapsed: str) -> list[str]:
    """The lines without those of idle threads."""
    return [
        line
        for line in collapsed.splitlines()
        if line and not _IDLE.search(line.rpartition(" ")[0])
    ]


def short(frame: str) -> str:
    """Function and file without the line, to merge frames of one function."""
    name, _, where = frame.partition(" (")
    path = where.rpartition(":")[0] or where.rstrip(")")
    parts = Path(path).parts
    return f"{name} ({'/'.join(parts[-2:])})" if parts else name


def profile(lines: Iterable[str], purposes: Purposes, title: str, commit: str) -> Profile:
    """The shares of the samples of collapsed stacks."""
    patterns = [(name, re.compile(pattern)) for name, pattern in purposes]
    by_purpose: Counter[str] = Counter()
    own: Counter[str] = Counter()
    cumulative: Counter[str] = Counter()
    for line in lines:
        stack, _, number = line.rpartition(" ")
        frames, samples = stack.split(";"), int(number)
        by_purpose[_purpose(frames, patterns)] += samples
        own[short(frames[-1])] += samples
        for name in {short(frame) for frame in frames}:
            if not _OUTERMOST.match(name):
                cumulative[name] += samples
    whole = max(by_purpose.total(), 1)

    def shares(counter: Counter[str]) -> dict[str, float]:
        return {name: round(n / whole, 4) for name, n in counter.most_common(MOST)}

    return Profile(
        title, commit, by_purpose.total(), shares(by_purpose), shares(own), shares(cumulative)
    )


def _purpose(frames: Sequence[str], patterns: Sequence[tuple[str, re.Pattern[str]]]) -> str:
    for frame in reversed(frames):
        for name, pattern in patterns:
            if pattern.search(frame):
                return name
    return REST


def stored(path: Path = PROFILES) -> dict[str, Profile]:
    """The stored profiles by the name of their picture."""
    return msgspec.json.decode(path.read_bytes(), type=dict[str, Profile]) if path.exists() else {}


def save(name: str, profile: Profile, path: Path = PROFILES) -> None:
    """Store a profile beside the others."""
    content = msgspec.json.encode(stored(path) | {name: profile}, order="deterministic")
    path.write_bytes(msgspec.json.format(content, indent=1) + b"\n")


def tables(profiles: dict[str, Profile]) -> str:
    """Markdown tables of the shares by purpose, then of the functions."""
    lines: list[str] = []
    for name, one in profiles.items():
        lines += [
            f"| {one.title} (`flames/{name}.svg`, commit {one.commit}) | share |",
            "|---|---|",
        ]
        lines += [f"| {what} | {share:.0%} |" for what, share in _sorted(one.purposes)]
        lines += ["", "| function | own time | function | with its callees |", "|---|---|---|---|"]
        pairs = zip(_sorted(one.own), _sorted(one.cumulative), strict=False)
        lines += [
            f"| `{own}` | {share:.1%} | `{whole}` | {all_of_it:.1%} |"
            for (own, share), (whole, all_of_it) in pairs
        ]
        lines.append("")
    return "\n".join(lines)


def _sorted(shares: dict[str, float]) -> list[tuple[str, float]]:
    return sorted(shares.items(), key=lambda pair: (-pair[1], pair[0]))
