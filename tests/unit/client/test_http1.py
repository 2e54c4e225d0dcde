"""Requests as bytes, and responses from bytes."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchrun_controller.client.http1 import (
    HttpError,
    HttpResponse,
    ResponseParser,
    encode_request,
    encode_target,
)

OK = b"HTTP/1.1 200 OK\r\n"
PLAIN = OK + b"Content-Type: application/json\r\nContent-Length: 2\r\n\r\n{}"


def parse(*parts: bytes) -> HttpResponse | None:
    parser = ResponseParser()
    responses = [parser.feed(part) for part in parts]
    return responses[-1]


class TestRequest:
    def test_with_a_body(self) -> None:
        request = encode_request("PATCH", "/x", {"Host": "a:1", "Accept": "*/*"}, b"{}")
        assert request == (
            b"PATCH /x HTTP/1.1\r\nHost: a:1\r\nAccept: */*\r\nContent-Length: 2\r\n\r\n{}"
        )

    def test_without_a_body(self) -> None:
        assert encode_request("GET", "/x", {"Host": "a"}, None) == (
            b"GET /x HTTP/1.1\r\nHost: a\r\n\r\n"
        )

    def test_an_empty_body_has_a_length(self) -> None:
        assert encode_request("PUT", "/x", {}, b"").endswith(b"Content-Length: 0\r\n\r\n")

    @pytest.mark.parametrize("value", ["a\r\nHost: b", "a\nb", "a\rb"])
    def test_a_value_cannot_add_a_header(self, value: str) -> None:
        with pytest.raises(ValueError, match="the value of Authorization contains a line break"):
            encode_request("GET", "/x", {"Authorization": value}, None)

    @pytest.mark.parametrize(
        ("path", "query", "target"),
        [
            ("/api/v1/pods", {}, "/api/v1/pods"),
            ("/api/v1/pods/a:80/proxy", {}, "/api/v1/pods/a:80/proxy"),
            ("/x?watch=true#y", {}, "/x%3Fwatch=true%23y"),
            ("/x%2e y\r\n", {}, "/x%252e%20y%0D%0A"),
            ("/x", {"force": "true", "a": "b=c&d +é"}, "/x?force=true&a=b%3Dc%26d+%2B%C3%A9"),
        ],
    )
    def test_target(self, path: str, query: dict[str, str], target: str) -> None:
        assert encode_target(path, query) == target


class TestResponse:
    def test_with_a_length(self) -> None:
        headers = {"content-type": "application/json", "content-length": "2"}
        assert parse(PLAIN) == HttpResponse(200, headers, b"{}", keep_alive=True)

    @pytest.mark.parametrize(
        ("response", "body", "keep_alive"),
        [
            (OK + b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n1\r\n}\r\n0\r\n\r\n", b"{}", True),
            (OK + b"Content-Length: 0\r\n\r\n", b"", True),
            (OK + b"Connection: close\r\nContent-Length: 1\r\n\r\nx", b"x", False),
            (b"HTTP/1.0 200 OK\r\nContent-Length: 1\r\n\r\nx", b"x", False),
            (b"HTTP/1.1 304 Not Modified\r\nContent-Length: 9\r\n\r\n", b"", True),
            (b"HTTP/1.1 100 Continue\r\n\r\n" + PLAIN, b"{}", True),
            (b"HTTP/1.1 103 Early Hints\r\nLink: x\r\n\r\n" + PLAIN, b"{}", True),
        ],
        ids=["chunked", "empty", "close", "1.0", "304", "100", "103"],
    )
    @given(data=st.data())
    def test_in_any_pieces(
        self, response: bytes, body: bytes, keep_alive: bool, data: st.DataObject
    ) -> None:
        cuts = sorted(data.draw(st.sets(st.integers(1, len(response) - 1))))
        parts = [response[a:b] for a, b in zip([0, *cuts], [*cuts, None], strict=True)]
        parsed = parse(*parts)
        assert parsed is not None
        assert (parsed.body, parsed.keep_alive) == (body, keep_alive)
        assert "link" not in parsed.headers

    def test_one_after_the_other(self) -> None:
        parser = ResponseParser()
        first, second = parser.feed(PLAIN), parser.feed(OK + b"Content-Length: 1\r\n\r\nx")
        assert first is not None
        assert first.body == b"{}"
        assert second is not None
        assert second.body == b"x"
        assert "content-type" not in second.headers

    def test_until_the_end_of_the_connection(self) -> None:
        parser = ResponseParser()
        assert parser.feed(OK + b"\r\nab") is None
        assert parser.feed(b"c") is None
        assert parser.end() == HttpResponse(200, {}, b"abc", keep_alive=False)

    @pytest.mark.parametrize(
        "start",
        [
            b"",
            b"HTTP/1.1 200",
            OK + b"Content-Length: 5\r\n\r\n{",
            OK + b"Transfer-Encoding: chunked\r\n\r\n5\r\n{",
            PLAIN,
        ],
        ids=["nothing", "half a line", "short", "short chunk", "a complete one"],
    )
    def test_a_connection_that_ends_too_early(self, start: bytes) -> None:
        parser = ResponseParser()
        parser.feed(start)
        with pytest.raises(HttpError, match="the connection was closed before"):
            parser.end()

    @pytest.mark.parametrize(
        "garbage",
        [
            b"SSH-2.0-OpenSSH_9.2\r\n",
            PLAIN + b"HTTP/1.1 200 OK\r\n",
            PLAIN + PLAIN,
            PLAIN + b"garbage",
            b"HTTP/1.1 101 Switching Protocols\r\nConnection: upgrade\r\nUpgrade: x\r\n\r\n",
            OK + b"Content-Length: 1\r\nTransfer-Encoding: chunked\r\n\r\n",
            OK + b"Content-Length: 1\r\nContent-Length: 2\r\n\r\n",
        ],
        ids=["not http", "one more", "two", "bytes after it", "upgrade", "smuggled", "two lengths"],
    )
    def test_anything_else(self, garbage: bytes) -> None:
        with pytest.raises(HttpError):
            parse(garbage)

    @given(st.binary(max_size=200), st.binary(max_size=50))
    def test_no_bytes_raise_another_error(self, head: bytes, tail: bytes) -> None:
        parser = ResponseParser()
        try:
            parser.feed(OK + head)
            parser.feed(tail)
            parser.end()
        except HttpError:
            pass
