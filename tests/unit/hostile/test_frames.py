"""Malformed watch frames affect their own object only: 20,000 here, a million in `make hostile`.

Prints the seed; `HOSTILE_SEED` sets it, `HOSTILE_FRAMES` the number.
"""

import asyncio
import json
import os
import random
import resource
from collections.abc import Sequence
from functools import partial

import pytest
from aiohttp import web

import virtual_time
from faults.surroundings import surroundings
from hostile import frames
from hostile.shrinking import shrunk
from hostile.values import NUMBERS
from hostile.wire import SAMPLES, UnreadError, Wire
from scripted_server import connection, serving, streamed
from torchrun_controller.leader import NotLeader
from unit.leader.electing import make, running
from unit.leader.lease_server import Client, LeaseServer

SEED = int(os.environ.get("HOSTILE_SEED", "0"))
FRAMES = int(os.environ.get("HOSTILE_FRAMES", "20000"))
ROUND = 500
# More than in the first rounds. A line may have 16 MiB, and is stored in pieces and as a whole.
GROWTH = 150 * 2**20


def problem(sample: int, lines: Sequence[bytes], pages: Sequence[bytes] = ()) -> str:
    try:
        asyncio.run(Wire(SAMPLES[sample], lines, pages).play())
    except UnreadError as error:
        return str(error)
    return ""


def goes_wrong(sample: int, pages: Sequence[bytes], lines: Sequence[bytes]) -> bool:
    return bool(problem(sample, lines, pages))


def round_of(number: int) -> tuple[int, list[bytes], list[bytes]]:
    chance = random.Random(f"{SEED} {number}")
    at = number % len(SAMPLES)
    real = [SAMPLES[at].named(f"victim-{i}", 100 + i) for i in range(frames.VICTIMS)]
    lines = [frames.line(chance, real) for _ in range(ROUND)]
    return at, lines, [frames.page(chance, real) for _ in range(chance.randint(0, 3))]


def peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


@pytest.mark.timeout(3600)
def test_a_malformed_frame_affects_its_object_only() -> None:
    print(f"HOSTILE_SEED={SEED}, {FRAMES} frames")
    before = 0
    with surroundings():
        for number in range(max(1, FRAMES // ROUND)):
            at, lines, pages = round_of(number)
            if found := problem(at, lines, pages):
                few = shrunk(lines, partial(goes_wrong, at, pages))
                shown = "\n".join(repr(line[:2000]) for line in few[:5])
                pytest.fail(f"round {number}, {SAMPLES[at].kind.resource}: {found}\n{shown}")
            if number == 20:
                before = peak()
    grown = peak() - before
    print(f"grown by {grown / 2**20:.0f} MiB to {peak() / 2**20:.0f} MiB")
    assert not before or grown < GROWTH


async def test_malformed_frames_on_a_real_connection_affect_their_objects_only() -> None:
    at, lines, pages = round_of(1)
    wire = Wire(SAMPLES[at], lines, pages)

    async def answer(request: web.BaseRequest) -> web.StreamResponse:
        if "watch" not in request.query:
            return web.Response(body=wire.page())
        response = await streamed(request)
        async for chunk in wire.chunks(request.query):
            await response.write(chunk)
        return response

    with surroundings():
        async with serving(answer) as server, connection(server.url).session("watch") as transport:
            await wire.play(transport)


def lease(number: int, odd: str = "") -> bytes:
    """A lease that another holder has just renewed. `odd`: its duration in seconds."""
    spec = {"holderIdentity": "other", "leaseDurationSeconds": 15, "renewTime": f"at {number}"}
    meta = {"name": "controller", "namespace": "system", "resourceVersion": str(1000 + number)}
    return json.dumps({"metadata": meta, "spec": spec}).replace("15", odd or "15").encode()


@virtual_time.in_virtual_time
async def test_frames_of_the_lease_do_not_end_the_process() -> None:
    """A frame with another holder ends the leader cleanly; no other frame ends it."""
    print(f"HOSTILE_SEED={SEED}")
    chance, server = random.Random(SEED), LeaseServer()
    with surroundings():
        for number in range(60):
            server.object = json.loads(lease(number))
            leader = make(Client(server, f"me-{number}"))
            async with running(leader) as task:
                for _ in range(20):
                    while not server.streams and not task.done():  # noqa: ASYNC110
                        await asyncio.sleep(0.5)
                    line = frames.line(chance, [json.loads(lease(number))])
                    if chance.random() < 0.2:
                        odd = lease(number, chance.choice(NUMBERS))
                        line = b'{"type":"MODIFIED","object":' + odd + b"}"
                    for stream in server.streams:
                        stream.put_nowait(line + b"\n")
                    await asyncio.sleep(chance.choice((0.0, 0.1, 2.0)))
                await asyncio.sleep(30.0)
                assert leader.may_write() or task.done(), f"it waits for ever, round {number}"
                ended = task.exception() if task.done() else None
                assert ended is None or isinstance(ended, NotLeader), f"{ended!r}"
