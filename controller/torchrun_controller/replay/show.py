"""Decisions as text or JSON lines; a decision that repeats the last Plan of its job is left out."""

import difflib
import json
from collections.abc import Iterator
from typing import Any, TextIO

from msgspec import to_builtins

from torchrun_controller.cache.observe import Key
from torchrun_controller.reconcile.model.plan import Delete, Plan
from torchrun_controller.replay.play import Decision

_CONTEXT = 2  # lines around a difference


def plan_content(plan: Plan) -> dict[str, Any]:
    """Return a Plan as JSON values, without empty parts.

    Keys: "apply" and "delete" (lists of objects with "resource" and "name"), "status", "events",
    and "requeueAfter" in seconds.
    """
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
        "collection": delete.collection,
        "indexes": delete.indexes,
    }


class Printer:
    """Writes decisions to `out`, as text or with `as_json` as one JSON object a line.

    `job` limits the output to one job (namespace, name); `brief` omits the bodies from the text.
    `printed` is the number of decisions that were written.
    """

    def __init__(
        self, out: TextIO, *, job: Key | None = None, as_json: bool = False, brief: bool = False
    ) -> None:
        self.printed = 0
        self._out = out
        self._job = job
        self._as_json = as_json
        self._brief = brief
        self._last: dict[Key, list[str]] = {}

    def print_decision(self, decision: Decision) -> None:
        """Write the decision, unless it equals the last one of its job."""
        if self._job is not None and decision.key != self._job:
            return
        content = {"bug": decision.bug} if decision.bug else plan_content(decision.plan)
        # A change of requeueAfter alone is not a new decision.
        compared = {name: part for name, part in content.items() if name != "requeueAfter"}
        lines = json.dumps(compared, indent=1).splitlines()
        previous = self._last.get(decision.key)
        if lines == previous:
            return
        self._last[decision.key] = lines
        self.printed += 1
        for text in self._as_text(decision, previous or [], lines, content):
            self._out.write(text + "\n")

    def _as_text(
        self, decision: Decision, previous: list[str], lines: list[str], content: dict[str, Any]
    ) -> Iterator[str]:
        header = {
            "time": decision.time.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "job": "/".join(decision.key),
            "phase": decision.phase,
            "cause": decision.cause,
        }
        if self._as_json:
            yield json.dumps({**header, **content})
            return
        phase = decision.phase or "(new)"
        yield f"{header['time']} {header['job']} {phase}, after {decision.cause}"
        yield f"    {summary(content)}"
        if not self._brief:
            changes = difflib.unified_diff(previous, lines, n=_CONTEXT, lineterm="")
            yield from (f"    {line}" for line in list(changes)[2:])


def summary(content: dict[str, Any]) -> str:
    """Return one line from a Plan's content (see `plan_content`), or from {"bug": traceback}."""
    if "bug" in content:
        return f"a bug: {content['bug'].strip().splitlines()[-1]}"
    parts = [
        f"{verb} " + ", ".join(f"{each['resource']}/{each['name']}" for each in content[verb])
        for verb in ("apply", "delete")
        if verb in content
    ]
    if "status" in content:
        status = content["status"]
        parts.append(f"status {status.get('phase')} ({status.get('reason', '')})")
    parts += [f"event {event['reason']}" for event in content.get("events", ())]
    if "requeueAfter" in content:
        parts.append(f"again in {content['requeueAfter']:g} s")
    return "; ".join(parts) or "nothing to do"
