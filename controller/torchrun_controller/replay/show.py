"""Decisions as text or JSON lines: only those that differ from the job's Plan before."""

import difflib
import json
from collections.abc import Iterator
from typing import Any, TextIO

from msgspec import to_builtins

from torchrun_controller.cache.observe import Key
from torchrun_controller.reconcile.model.plan import Delete, Plan
from torchrun_controller.replay.play import Decision

_CONTEXT = 2  # lines around a difference


def plain(plan: Plan) -> dict[str, Any]:
    """A Plan as JSON has it; what is empty is left out."""
    parts = {
        "apply": [
            {"resource": each.kind.resource, "name": each.name, "body": to_builtins(each.body)}
            for each in plan.applies
        ],
        "delete": [_deletion(each) for each in plan.deletes],
        "status": None if plan.status is None else to_builtins(plan.status),
        "events": to_builtins(plan.events),
        "requeueAfter": plan.requeue_after,
    }
    return {name: part for name, part in parts.items() if part not in (None, [], ())}


def _deletion(delete: Delete) -> dict[str, Any]:
    return {
        "resource": delete.kind.resource,
        "name": delete.name,
        "uid": delete.uid,
        "propagation": delete.propagation,
        "graceSeconds": delete.grace_seconds,
    }


class Printer:
    """Writes decisions to `out`; `job` limits them to one, `brief` leaves the bodies out."""

    def __init__(
        self, out: TextIO, *, job: Key | None = None, as_json: bool = False, brief: bool = False
    ) -> None:
        self.shown = 0
        self._out = out
        self._job = job
        self._as_json = as_json
        self._brief = brief
        self._last: dict[Key, list[str]] = {}

    def tell(self, decision: Decision) -> None:
        """Show it, if it is another than before."""
        if self._job is not None and decision.key != self._job:
            return
        said = {"bug": decision.bug} if decision.bug else plain(decision.plan)
        # A countdown alone is no news.
        compared = {name: part for name, part in said.items() if name != "requeueAfter"}
        lines = json.dumps(compared, indent=1).splitlines()
        before = self._last.get(decision.key)
        if lines == before:
            return
        self._last[decision.key] = lines
        self.shown += 1
        for text in self._as_text(decision, before or [], lines, said):
            self._out.write(text + "\n")

    def _as_text(
        self, decision: Decision, before: list[str], lines: list[str], said: dict[str, Any]
    ) -> Iterator[str]:
        head = {
            "time": decision.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "job": "/".join(decision.key),
            "phase": decision.phase,
            "cause": decision.cause,
        }
        if self._as_json:
            yield json.dumps({**head, **said})
            return
        yield f"{head['time']} {head['job']} {head['phase'] or '(new)'}, after {head['cause']}"
        yield f"    {summary(said)}"
        if not self._brief:
            changes = difflib.unified_diff(before, lines, n=_CONTEXT, lineterm="")
            yield from (f"    {line}" for line in list(changes)[2:])


def summary(said: dict[str, Any]) -> str:
    """One line: what would be done."""
    if "bug" in said:
        return f"a bug: {said['bug'].strip().splitlines()[-1]}"
    parts = [
        f"{verb} " + ", ".join(f"{each['resource']}/{each['name']}" for each in said[verb])
        for verb in ("apply", "delete")
        if verb in said
    ]
    if "status" in said:
        status = said["status"]
        parts.append(f"status {status.get('phase')} ({status.get('reason', '')})")
    parts += [f"event {event['reason']}" for event in said.get("events", ())]
    if "requeueAfter" in said:
        parts.append(f"again in {said['requeueAfter']:g} s")
    return "; ".join(parts) or "nothing to do"
