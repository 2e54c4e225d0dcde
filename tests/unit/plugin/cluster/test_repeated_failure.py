"""When the last attempts prove an error in the code."""

import msgspec
import pytest

from kubectl_torchrun.cluster.repeated_failure import find_repeated_failure
from kubectl_torchrun.cluster.slices import JobSlice
from torchrun_api.json import JsonObject

BAD_BATCH = "ValueError: bad batch (64)"


def end(number: int, message: str = BAD_BATCH, **fields: object) -> JsonObject:
    """An attempt as the controller records it. Pod, rank and node differ between attempts."""
    facts = f"(rank {number}, machine host-{number}, exit code 1)."
    return msgspec.to_builtins(
        {
            "number": number,
            "startTime": f"2026-01-01T00:0{number}:00Z",
            "endTime": f"2026-01-01T00:0{number}:30Z",
            "runningSeconds": 20,
            "reason": "Exception",
            "message": f"Pod run-r{number}-0-abcde: {message} {facts}",
            **fields,
        }
    )


def job(*attempts: JsonObject, **status: object) -> JobSlice:
    return msgspec.convert({"status": {"attempts": attempts, **status}}, JobSlice)


@pytest.mark.parametrize(
    "observed",
    [
        pytest.param(job(end(0), end(1), end(2)), id="three attempts"),
        pytest.param(
            job(end(0, reason="Hung"), end(1), end(2), end(3)), id="after another failure"
        ),
        pytest.param(job(end(0, round=0), end(0, round=1), end(0)), id="rounds of one attempt"),
        pytest.param(job(end(1), end(2, round=0), end(2)), id="an attempt and a round"),
        pytest.param(
            job(end(0, round=0), end(0, round=1), end(0, runningSeconds=70)),
            id="three rounds that are short each",
        ),
        pytest.param(
            job(end(1), end(2), end(3), progress={"step": 5, "time": "2026-01-01T00:00:59Z"}),
            id="progress of an earlier attempt",
        ),
    ],
)
def test_an_exception_that_repeats(observed: JobSlice) -> None:
    repeated = find_repeated_failure(observed)
    assert repeated is not None
    assert repeated.exception == BAD_BATCH


def test_addresses_of_objects_may_differ() -> None:
    ends = [end(number, f"TypeError: <A object at 0x7f{number}a>") for number in range(3)]
    repeated = find_repeated_failure(job(*ends))
    assert repeated is not None
    assert repeated.exception == "TypeError: <A object at 0x7f2a>"


@pytest.mark.parametrize(
    "observed",
    [
        pytest.param(job(), id="no attempt"),
        pytest.param(job(end(0), end(1)), id="two attempts"),
        pytest.param(job(end(0), end(1), end(2, "KeyError: 'x'")), id="another exception"),
        pytest.param(job(end(0), end(1, reason="OOMKilled"), end(2)), id="another reason"),
        pytest.param(job(end(0), end(1, runningSeconds=60), end(2)), id="a longer run"),
        pytest.param(job(end(0), end(1), end(3)), id="an attempt without a record"),
        pytest.param(job(end(0), end(1), end(2, reason="")), id="no reason"),
        pytest.param(
            job(end(1), end(2), end(3), progress={"step": 1, "time": "2026-01-01T00:01:00Z"}),
            id="a step",
        ),
        pytest.param(job(end(0), end(1), end(2), progress={"step": 1}), id="a step, time unknown"),
    ],
)
def test_no_repeated_failure(observed: JobSlice) -> None:
    assert find_repeated_failure(observed) is None
