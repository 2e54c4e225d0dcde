"""Token reviews: which tokens the API server accepts, for how long, and how many are cached."""

import asyncio

import pytest
import structlog

from torchrun_controller.cache.progress_reports import ReportingWorker
from torchrun_controller.serving.progress import tokens
from torchrun_controller.serving.progress.tokens import BusyError
from unit.serving.progress.reporting import JOB, POD, World, connection_to, running, token


async def test_a_review_is_cached_for_a_minute() -> None:
    async with running(World()) as world:
        for _ in range(5):
            assert (await world.post())[0] == 204
            world.time += 10
        assert world.reviews == 1
        world.time += 20
        assert (await world.post())[0] == 204
        assert world.reviews == 2


async def test_a_review_is_cached_until_the_token_expires() -> None:
    short = token(expires=5)
    async with running(World(good={short})) as world:
        assert (await world.post(authorization=f"Bearer {short}"))[0] == 204
        world.time += 6
        assert (await world.post(authorization=f"Bearer {short}"))[0] == 204
        assert world.reviews == 2


async def test_the_review_counts_and_not_the_claims() -> None:
    """A token whose claims name a worker, and whose review names another pod."""
    other = ("ml", "theirs-0", "uid-theirs")
    stolen = token(pod=other)
    world = World(workers={other: ReportingWorker(("ml", "theirs"), "uid-child")}, good={stolen})
    async with running(world):
        assert (await world.post(authorization=f"Bearer {stolen}"))[0] == 403
    assert world.accepted == []


async def test_a_review_without_an_audience_proves_nothing() -> None:
    async with running(World(audiences=[])) as world:
        assert (await world.post())[0] == 401


THEIRS = ("evil", "theirs-0", "uid-theirs")


async def test_forged_tokens_of_one_pod_do_not_block_others() -> None:
    workers = {
        POD: ReportingWorker(JOB, "uid-child"),
        THEIRS: ReportingWorker(("evil", "theirs"), "uid-other"),
    }
    async with running(World(workers=workers)) as world:
        with structlog.testing.capture_logs() as lines:
            forged = [f"Bearer {token(THEIRS)}{n}" for n in range(100)]
            codes = [(await world.post(authorization=a))[0] for a in forged]
        assert codes == [401] * 3 + [503] * 97
        assert world.reviews == 3
        assert world.observed == 0, "no work before the token is verified"
        assert [line["event"] for line in lines] == ["progress reports are refused"]
        assert (await world.post())[0] == 204


async def test_many_pods_of_one_namespace_do_not_block_others() -> None:
    theirs = [("evil", f"theirs-{n}", f"uid-{n}") for n in range(120)]
    workers = {pod: ReportingWorker(("evil", "theirs"), "uid-other") for pod in theirs}
    async with running(World(workers={POD: ReportingWorker(JOB, "uid-child"), **workers})) as world:
        codes = [
            (await world.post(authorization=f"Bearer {token(pod)}{n}"))[0]
            for n in range(3)
            for pod in theirs
        ]
        assert codes.count(401) == world.reviews == 50
        assert (await world.post())[0] == 204


async def test_pods_of_four_namespaces_can_use_up_all_reviews_but_block_no_verified_token() -> None:
    """docs/security.md describes this limit."""
    theirs = [(f"evil-{k}", f"theirs-{n}", f"uid-{k}-{n}") for k in range(4) for n in range(17)]
    workers = {pod: ReportingWorker((pod[0], "theirs"), "uid-other") for pod in theirs}
    new_pod = (POD[0], "train-1-abcde", "uid-new")
    workers |= {
        POD: ReportingWorker(JOB, "uid-child"),
        new_pod: ReportingWorker(("ml", "other"), "uid-child"),
    }
    async with running(World(workers=workers, good={token(), token(new_pod)})) as world:
        assert (await world.post())[0] == 204
        world.time += 61
        for n in range(3):
            for pod in theirs:
                await world.post(authorization=f"Bearer {token(pod)}{n}")
        assert world.reviews == 1 + 200
        status, message = (await world.post(authorization=f"Bearer {token(new_pod)}"))[:2]
        assert status == 503, message
        assert (await world.post())[0] == 204


async def test_a_verified_token_is_reviewed_again_despite_forged_ones() -> None:
    async with running(World()) as world:
        assert (await world.post())[0] == 204
        world.time += 61
        for n in range(5):
            await world.post(authorization=f"Bearer {token()}{n}")
        assert world.reviews == 4
        assert (await world.post())[0] == 204
        assert world.reviews == 5


async def test_a_forged_pod_name_takes_no_token_of_that_pod() -> None:
    async with running(World()) as world, connection_to(world) as verdicts:
        claims = verdicts.claims(token())
        assert claims is not None
        for n in range(3):
            assert await verdicts.pod_of(f"{token()}{n}", claims, "10.0.0.66") is None
        with pytest.raises(BusyError, match="too many tokens that name pod train-0-abcde"):
            await verdicts.pod_of(f"{token()}4", claims, "10.0.0.66")
        assert await verdicts.pod_of(token(), claims, "10.0.0.7") is not None


async def test_a_revoked_token_is_forgotten() -> None:
    async with running(World()) as world:
        assert (await world.post())[0] == 204
        world.good.clear()
        world.time += 61
        assert (await world.post())[0] == 401
        world.time += 5
        assert (await world.post())[0] == 401
        assert world.reviews == 2, "a refusal is cached for some time"


@pytest.mark.parametrize("junk", [b"\xff", b"\xc3\xa9", b"\x7f", b" x", b".x"])
async def test_a_token_with_invalid_bytes_is_refused(junk: bytes) -> None:
    async with running(World()) as world:
        reader, writer = await asyncio.open_connection("127.0.0.1", world.port)
        head = (
            b"POST /v1/progress HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\nAuthorization: Bearer "
        )
        writer.write(head + token().encode() + junk + b"\r\n\r\n{}")
        answer = await reader.readline()
        # The HTTP parser refuses bytes that are invalid in a header.
        assert answer.split()[1] in ((b"400",) if junk == b"\x7f" else (b"401",))
        assert world.reviews == 0
        writer.close()


async def test_the_cache_of_reviews_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tokens, "MAX_CACHED", 2)
    world = World()
    async with connection_to(world) as verdicts:
        claims = verdicts.claims(token())
        assert claims is not None
        for source, n in enumerate((1, 2, 3, 1)):
            assert await verdicts.pod_of(f"{token()}{n}", claims, str(source)) is None
        assert world.reviews == 4
