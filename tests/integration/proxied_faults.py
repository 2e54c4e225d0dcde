"""One fault at one point of a scenario on a real API server. See fault_proxy.py.

Names and kinds are those of the simulation (tests/faults/faults.py), except for a list from a stale
server, as there is only one server.
"""

import asyncio
import json
import re
from collections import Counter
from collections.abc import Callable, Mapping

from aiohttp import web

from faults.api_server import target_of
from faults.faults import Point
from faults.store import short_name
from integration.fault_proxy import Call, Faults, RequestFault, Severed

LATE = 5.0  # seconds, longer than the lease of proxied_world.py
_POD_SUFFIX = re.compile(r"^(.*-\d+)-[a-z0-9]{5}$")
_EXPIRED = {"kind": "Status", "code": 410, "reason": "Expired", "message": "by a fault"}


class Crash(RequestFault):
    """The requesting process dies at one of three steps."""

    def __init__(self, step: str, kill: Callable[[str], None]) -> None:
        self._step, self._kill = step, kill

    async def sent(self, call: Call) -> web.Response | None:
        self._at("before", call)
        return None

    async def carried_out(self, call: Call) -> None:
        self._at("after-commit", call)

    async def received(self, call: Call) -> None:
        if self._step == "after-answer":
            await asyncio.sleep(0.002)  # time for the process to read the response
            self._kill(call.who)

    def _at(self, step: str, call: Call) -> None:
        if step == self._step:
            self._kill(call.who)
            raise Severed


class Refused(RequestFault):
    """The server refuses the request."""

    def __init__(self, code: int, reason: str) -> None:
        self._code, self._reason = code, reason

    async def sent(self, call: Call) -> web.Response | None:
        status = {"kind": "Status", "code": self._code, "reason": self._reason}
        headers = {"Retry-After": "1"} if self._code == 429 else {}
        return web.json_response(
            {**status, "message": "by a fault"}, status=self._code, headers=headers
        )


class TimedOut(RequestFault):
    """The request gets lost and has no response."""

    async def sent(self, call: Call) -> web.Response | None:
        await asyncio.sleep(60)
        raise Severed


class Dropped(RequestFault):
    """The connection breaks after the server has processed the request."""

    async def carried_out(self, call: Call) -> None:
        raise Severed


class Late(RequestFault):
    """The response takes longer than the lease duration."""

    async def carried_out(self, call: Call) -> None:
        await asyncio.sleep(LATE)


OF_REQUESTS: Mapping[str, Callable[[Callable[[str], None]], RequestFault]] = {
    "crash-before": lambda kill: Crash("before", kill),
    "crash-after-commit": lambda kill: Crash("after-commit", kill),
    "crash-after-answer": lambda kill: Crash("after-answer", kill),
    "409": lambda _: Refused(409, "Conflict"),
    "422": lambda _: Refused(422, "Invalid"),
    "429": lambda _: Refused(429, "TooManyRequests"),
    "500": lambda _: Refused(500, "InternalError"),
    "timeout": lambda _: TimedOut(),
    "dropped": lambda _: Dropped(),
    "late": lambda _: Late(),
}
OF_EVENTS = ("watch-dropped", "watch-delayed", "watch-relisted", "watch-compacted")


class SingleFault(Faults):
    """Records every point, and injects the fault at one of them. `kill` ends a process."""

    def __init__(self, at: Point | None, kind: str, kill: Callable[[str], None]) -> None:
        self.met: list[Point] = []
        self.struck = False
        self._at, self._kind, self._kill = at, kind, kill
        self._seen: Counter[str] = Counter()
        self._refused = ""  # the path of the watch whose version is compacted

    def request(self, call: Call) -> RequestFault:
        if call.method == "WATCH" and call.path == self._refused and "Version=" in call.query:
            self._refused = ""
            return Refused(410, "Expired")
        if call.session and self._meet(f"{call.session} {call.method} {about(call.path)}"):
            return OF_REQUESTS[self._kind](self._kill)
        return RequestFault()

    async def event(self, call: Call, line: bytes) -> bytes:
        event = json.loads(line)
        if event["type"] == "BOOKMARK" or not call.session:
            return line
        plural = target_of(call.path).resource[1]
        name = _stable(plural, event["object"]["metadata"]["name"])
        if not self._meet(f"event {event['type']} {short_name(plural, name)}"):
            return line
        if self._kind == "watch-delayed":
            await asyncio.sleep(LATE)
            return line
        if self._kind == "watch-relisted":
            return line + json.dumps({"type": "ERROR", "object": _EXPIRED}).encode() + b"\n"
        if self._kind == "watch-compacted":
            self._refused = call.path
        raise Severed

    def _meet(self, what: str) -> bool:
        self._seen[what] += 1
        point = Point(what, self._seen[what])
        self.met.append(point)
        if point != self._at:
            return False
        self.struck = True
        return True


def about(path: str) -> str:
    """The resource and name of a path, without the namespace and random suffixes."""
    if path.count("/") <= 1:
        return path
    target = target_of(path)
    plural = target.resource[1]
    name = short_name(plural, _stable(plural, target.name)) if target.name else plural
    return f"{name}/{target.subresource}" if target.subresource else name


def _stable(plural: str, name: str) -> str:
    suffixed = _POD_SUFFIX.match(name) if plural == "pods" else None
    return suffixed[1] if suffixed else name
