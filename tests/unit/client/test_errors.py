"""Error responses: a Status and any other body become an ApiError."""

from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from garbled import GARBLED
from torchrun_controller.client import (
    ApiError,
    Disconnected,
    InvalidResponse,
    Response,
    StatusCause,
)
from torchrun_controller.client.responses import read_deleted, read_holder, read_object

INVALID = b"""{"kind":"Status","apiVersion":"v1","status":"Failure","code":422,"reason":"Invalid",
"message":"Job.batch \\"x\\" is invalid","details":{"name":"x","causes":[
{"reason":"FieldValueInvalid","message":"Invalid value: 5","field":"spec.template"},
{"message":"no field"}]}}"""


def test_a_status() -> None:
    error = ApiError.from_answer(422, INVALID)
    assert (error.status, error.reason) == (422, "Invalid")
    assert error.causes == (
        StatusCause("spec.template", "Invalid value: 5"),
        StatusCause("", "no field"),
    )
    assert str(error) == '422 Invalid: Job.batch "x" is invalid'


@pytest.mark.parametrize(
    ("body", "header", "seconds"),
    [
        (b'{"kind":"Status","details":{"retryAfterSeconds":3}}', "", 3.0),
        (b'{"kind":"Status","details":{"retryAfterSeconds":3}}', "9", 3.0),
        (b'{"kind":"Status","details":{"retryAfterSeconds":%s}}' % (b"9" * 400), "", 600.0),
        (b"", "9" * 400, 600.0),
        (b"Too many requests, please try again later.\n", "1", 1.0),
        (b'{"kind":"Status","details":{"causes":null}}', "", None),
        (b"", "Fri, 31 Dec 1999 23:59:59 GMT", None),
        (b"", "-1", None),
        (b"", "٣", None),
    ],
)
def test_retry_after(body: bytes, header: str, seconds: float | None) -> None:
    assert ApiError.from_answer(429, body, header).retry_after == seconds


@pytest.mark.parametrize(
    ("status", "body", "words"),
    [
        (502, b"<html>\n  Bad   gateway</html>", "502 BadGateway: <html> Bad gateway</html>"),
        (500, INVALID[:40], '500 InternalServerError: {"kind":"Status","apiVersion":"v1","stat'),
        (404, b'{"kind":"Pod"}', '404 NotFound: {"kind":"Pod"}'),
        (403, b'{"kind":"Status"}', "403 Forbidden: no message from the server"),
        (599, b"", "599 Unknown: no message from the server"),
        (500, b"x" * 1000, f"500 InternalServerError: {'x' * 200}..."),
        (500, b"\xff\xfe", "500 InternalServerError: \ufffd\ufffd"),
    ],
)
def test_a_body_that_is_no_status(status: int, body: bytes, words: str) -> None:
    assert str(ApiError.from_answer(status, body)) == words


@settings(deadline=None)
@given(st.integers(300, 999), st.binary(), st.text())
def test_any_body_becomes_an_error(status: int, body: bytes, header: str) -> None:
    assert ApiError.from_answer(status, body, header).status == status


@pytest.mark.parametrize("body", GARBLED)
def test_an_undecodable_response_counts_as_lost(body: bytes) -> None:
    answer = Response(200, body, request="GET /api/v1/pods/a")
    with pytest.raises(Disconnected, match=r"GET /api/v1/pods/a: unexpected response"):
        answer.read(read_object)


def test_its_message_contains_no_token() -> None:
    review = b'{"kind":"TokenReview","apiVersion":"authentication.k8s.io/v1","spec":{"token":"ey"}'
    with pytest.raises(InvalidResponse) as error:
        Response(201, review).read(read_object)
    assert "TokenReview" in str(error.value)
    assert "ey" not in str(error.value)


@given(st.binary())
def test_no_bytes_raise_another_exception(body: bytes) -> None:
    for parse in (read_deleted, read_holder, read_object):
        with suppress(InvalidResponse):
            Response(200, body).read(parse)


def test_the_status_after_a_delete_needs_no_identity() -> None:
    assert Response(200, b'{"kind":"Status","metadata":{}}').read(read_deleted).uid == ""
