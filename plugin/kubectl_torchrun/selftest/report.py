"""The report of a self-test as JSON and as a page of HTML. Pure: it writes no file.

It is made to be published. Of the cluster it has versions, the GPU, the names of networks in NCCL,
numbers, and the reasons of the API. `Facts` and `CheckResult` have no other fields.
"""

import html
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from kubectl_torchrun.selftest.checks import CheckResult
from kubectl_torchrun.selftest.facts import RankVersions, plain
from kubectl_torchrun.text import human
from torchrun_api.json import JsonObject, object_at

SCHEMA = "torchrun-selftest/1"
MARKS = {"passed": "✓", "failed": "✗", "skipped": "–"}


class Facts(NamedTuple):
    """What the results were measured with. date: ISO 8601. files: whether the queue has storage for
    checkpoints; None if unknown. seconds: of the whole self-test.
    """

    date: str
    nodes: int
    plugin: str
    controller: str = ""
    kubernetes: str = ""
    ranks: RankVersions = RankVersions()
    files: bool | None = None
    seconds: float = 0.0


def as_json(facts: Facts, results: Sequence[CheckResult]) -> JsonObject:
    """The report for programs."""
    ranks = facts.ranks
    return {
        "schema": SCHEMA,
        "date": facts.date,
        "passed": has_passed(results),
        "seconds": round(facts.seconds, 1),
        "hardware": {
            "gpu": plain(ranks.gpu),
            "gpuMemoryBytes": ranks.gpu_bytes,
            "gpus": ranks.world if ranks.gpu else 0,
            "ranks": ranks.world or None,
            "nodes": facts.nodes,
            "backend": plain(ranks.backend),
            "checkpointFiles": facts.files,
        },
        "versions": {
            "plugin": plain(facts.plugin),
            "controller": plain(facts.controller),
            "kubernetes": plain(facts.kubernetes),
            "python": plain(ranks.python),
            "torch": plain(ranks.torch),
            "cuda": plain(ranks.cuda),
            "nccl": plain(ranks.nccl),
            "driver": plain(ranks.driver),
        },
        "checks": [_check(result) for result in results],
    }


def has_passed(results: Iterable[CheckResult]) -> bool:
    """Whether a check has passed and none has failed. Skipped ones do not apply to this cluster."""
    verdicts = {result.verdict for result in results}
    return "passed" in verdicts and "failed" not in verdicts


def _check(result: CheckResult) -> JsonObject:
    seconds = result.found.seconds
    return {
        "name": result.check.name,
        "title": result.check.title,
        "result": result.verdict,
        "expected": result.check.expected,
        "seen": result.found.seen,
        "seconds": None if seconds is None else round(seconds, 1),
        "reason": result.reason,
        "allReduce": [
            {
                "bytes": size.bytes,
                "seconds": float(f"{size.seconds:.4g}"),
                "algorithmGBps": float(f"{size.algorithm:.4g}"),
                "busGBps": float(f"{size.bus:.4g}"),
                "correct": size.correct,
            }
            for size in result.found.sizes
        ],
    }


_STYLE = """
body { font: 15px/1.5 system-ui, sans-serif; max-width: 60rem; margin: 2rem auto; }
table { border-collapse: collapse; width: 100%; margin-bottom: 2rem; }
th, td { border-bottom: 1px solid #8884; padding: .35rem .6rem; text-align: left; }
tr { font-variant-numeric: tabular-nums; vertical-align: top; }
.passed td:first-child { color: #18794e; } .failed td:first-child { color: #cd2b31; }
@media (prefers-color-scheme: dark) { body { background: #111; color: #eee; } }
"""
_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>Torchrun self-test</title>
<style>{style}</style></head><body>
<h1>Torchrun Controller: self-test of {date}</h1>
<p>{passed} of {count} checks passed in {seconds:.0f} s. Schema {schema}.</p>
<table>{checks}</table>
<h2>All-reduce by size</h2>
<table>{sizes}</table>
<h2>Hardware and versions</h2>
<table>{facts}</table>
</body></html>
"""


def as_html(facts: Facts, results: Sequence[CheckResult]) -> str:
    """The same facts as one page without other files."""
    checks = [_row("check", "expected", "seen", "seconds", tag="th")]
    for result in results:
        title = f"{MARKS[result.verdict]} {result.check.title}"
        seconds = "" if result.found.seconds is None else f"{result.found.seconds:.1f}"
        checks.append(
            _row(title, result.check.expected, result.text, seconds, style=result.verdict)
        )
    sizes = [_row("size", "ms", "algorithm GB/s", "bus GB/s", tag="th")]
    for size in (size for result in results for size in result.found.sizes):
        figures = (size.seconds * 1e3, size.algorithm, size.bus)
        sizes.append(_row(human(size.bytes), *(f"{figure:.3f}" for figure in figures)))
    body = as_json(facts, results)
    known = [
        _row(name, str(value))
        for part in ("hardware", "versions")
        for name, value in object_at(body, part).items()
        if value is not None
    ]
    return _PAGE.format(
        style=_STYLE,
        date=html.escape(facts.date),
        passed=sum(result.verdict == "passed" for result in results),
        count=len(results),
        seconds=facts.seconds,
        schema=SCHEMA,
        checks="".join(checks),
        sizes="".join(sizes),
        facts="".join(known),
    )


def _row(*cells: str, tag: str = "td", style: str = "") -> str:
    inner = "".join(f"<{tag}>{html.escape(cell)}</{tag}>" for cell in cells)
    return f'<tr class="{style}">{inner}</tr>\n'
