import io
import json
import logging
import sys
import warnings
from collections.abc import Iterator

import pytest
import structlog

from torchrun_controller.logs import REDACTED, configure, set_level

JWT = "eyJhbGciOiJSUzI1NiJ9.eyJpc3MiOiJrdWJlcm5ldGVzIn0.c2lnbmF0dXJl"


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    logging.captureWarnings(False)
    root.handlers[:] = handlers
    root.setLevel(level)
    structlog.reset_defaults()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def lines(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


@pytest.fixture
def stream() -> io.StringIO:
    stream = io.StringIO()
    configure("info", "auto", stream)
    return stream


def test_without_a_terminal_a_line_is_one_json_object(stream: io.StringIO) -> None:
    structlog.get_logger("here").info("job started", job="a/b", attempt=0, odd={1, 2}.__class__)
    (line,) = lines(stream)
    assert list(line)[:3] == ["time", "level", "message"]
    assert str(line.pop("time")).endswith("Z")
    assert line == {
        "level": "info",
        "message": "job started",
        "logger": "here",
        "job": "a/b",
        "attempt": 0,
        "odd": "<class 'set'>",
    }


def test_on_a_terminal_lines_are_coloured() -> None:
    stream = Terminal()
    configure("info", "auto", stream)
    structlog.get_logger().info("job started", job="a/b")
    assert "\x1b[" in stream.getvalue()
    assert "job started" in stream.getvalue()


def test_the_format_can_be_forced() -> None:
    terminal, pipe = Terminal(), io.StringIO()
    configure("info", "json", terminal)
    structlog.get_logger().info("one")
    assert lines(terminal)[0]["message"] == "one"
    configure("info", "console", pipe)
    structlog.get_logger().info("two")
    assert "two" in pipe.getvalue()
    assert "\x1b[" not in pipe.getvalue()


def test_standard_error_is_the_default(capsys: pytest.CaptureFixture[str]) -> None:
    configure("info", "json")
    structlog.get_logger().info("here")
    assert "here" in capsys.readouterr().err


def test_logs_of_the_standard_library_have_the_same_format(stream: io.StringIO) -> None:
    logging.getLogger("dependency").warning("value %s", 3, extra={"more": 1})
    structlog.get_logger().info("value %s", 4)
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.warn("careful", UserWarning, stacklevel=1)
    dependency, ours, warning = lines(stream)
    assert dependency["message"] == "value 3"
    assert dependency["more"] == 1
    assert dependency["logger"] == "dependency"
    assert ours["message"] == "value 4"
    assert "careful" in str(warning["message"])


def test_the_level_can_be_changed_at_run_time(stream: io.StringIO) -> None:
    log = structlog.get_logger()
    log.debug("one")
    set_level("debug")
    log.debug("two")
    logging.getLogger("kubernetes_asyncio.client.rest").debug("a body")
    set_level("error")
    log.warning("three")
    assert [line["message"] for line in lines(stream)] == ["two"]
    with pytest.raises(
        ValueError, match="'loud' is not a log level: it must be one of debug, info"
    ):
        set_level("loud")


@pytest.mark.parametrize("format", ["json", "console"])
@pytest.mark.parametrize("stream_type", [io.StringIO, Terminal])
def test_credentials_are_redacted(format: str, stream_type: type[io.StringIO]) -> None:
    stream = stream_type()
    configure("info", format, stream)  # type: ignore[arg-type]
    log = structlog.get_logger()
    log.info(
        f"sent Bearer {JWT}",
        token="hidden-1",
        headers={"Authorization": "Basic hidden-2", "deep": [{"Set-Cookie": "hidden-3"}]},
        url="https://user:hidden-4@host/p?X-Amz-Signature=hidden-5&ok=visible-1",
        text="Authorization: Basic hidden-6aGlkZGVu visible-2",
        password=b"hidden-7",
        tokens=[1, 2],
    )
    logging.getLogger("dependency").error("header %r", {"authorization": "Bearer hidden-8hidden"})
    log.error(f"Bearer hidden-9hidden\nBearer hidden-9hidden {JWT}")
    written = stream.getvalue()
    assert "hidden" not in written
    assert "eyJ" not in written
    assert written.count(REDACTED) >= 9
    assert "visible-1" in written
    assert "visible-2" in written
    assert "[1" in written


@pytest.mark.parametrize("format", ["json", "console"])
def test_a_traceback_is_shown_without_local_variables_and_credentials(format: str) -> None:
    stream = Terminal()
    configure("info", format, stream)  # type: ignore[arg-type]
    try:
        local = "a-local-value"
        raise ValueError(f"refused: Bearer {JWT}, {len(local)}")
    except ValueError:
        structlog.get_logger().exception("failed")
    assert "Traceback" in stream.getvalue()
    assert "refused" in stream.getvalue()
    assert "eyJ" not in stream.getvalue()
    assert "a-local-value" not in stream.getvalue().replace('local = "a-local-value"', "")


def test_a_logger_made_before_configure_follows_it() -> None:
    early = structlog.get_logger("early")
    stream = io.StringIO()
    configure("info", "json", stream)
    early.info("now")
    assert lines(stream)[0]["message"] == "now"
    assert sys.stderr is not stream


class Closed(io.StringIO):
    def write(self, text: str) -> int:
        raise BrokenPipeError


def test_a_stream_that_is_gone_does_not_end_the_process() -> None:
    configure("info", "json", Closed())
    structlog.get_logger().info("lost")


def test_values_are_filled_in_and_stacks_are_shown(stream: io.StringIO) -> None:
    structlog.get_logger().info("%d of %d", 1, 2, stack_info=True)
    (line,) = lines(stream)
    assert line["message"] == "1 of 2"
    assert "test_values_are_filled_in" in str(line["stack"])
