"""Structured logs on standard error: one JSON object a line, or coloured lines on a terminal.

    configure("info", "auto")
    log = structlog.get_logger()
    log.info("job started", job="team-a/train", attempt=0)

Our lines are rendered and written directly, which takes a third of the time of the standard
library's way. Those of dependencies, asyncio and `warnings` come from its root logger. Both have
the same format, level (`set_level` at run time) and redaction of credentials: values whose key
names a credential, and text that looks like one, also in tracebacks. Tracebacks never show local
variables.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
from contextlib import suppress
from functools import lru_cache
from typing import Any, Literal, TextIO, get_args

import msgspec
import structlog

LogLevel = Literal["debug", "info", "warning", "error"]
LogFormat = Literal["auto", "json", "console"]
LEVELS: tuple[str, ...] = get_args(LogLevel)

# Their debug records contain bodies and headers of requests, or are of no use.
_QUIET_LOGGERS = ("aiohttp", "asyncio", "kubernetes_asyncio", "urllib3")

REDACTED = "***"
_SECRET_KEY = re.compile(r"authorization|token|password|passwd|secret|credential|cookie", re.I)
_SECRET_TEXT = re.compile(
    r"(?P<scheme>authorization\W{1,6}(?:\w+\s+)?|bearer\s+)[\w.~+/=-]{8,}"
    r"|eyJ[\w-]{8,}\.[\w-]{8,}\.[\w-]*"  # a JSON web token
    r"|(?P<user>://[^/\s:@\"']*:)[^@/\s\"']+(?=@)"  # https://user:password@host
    r"|(?P<query>[?&](?:X-Amz-Signature|X-Amz-Security-Token|[\w-]*token|sig|signature)=)[^&\s\"'\\]+",
    re.I,
)
# Each text that matches contains one of these in lower case. Most lines contain none.
_SECRET_HINTS = ("authorization", "bearer", "eyj", "://", "?", "&")

_Event = MutableMapping[str, Any]

_encoder = msgspec.json.Encoder(enc_hook=repr)


def configure(level: LogLevel, format: LogFormat, stream: TextIO | None = None) -> None:
    """Configure logging for the process; `auto` means console if the stream is a terminal."""
    stream = sys.stderr if stream is None else stream
    console = format == "console" or (format == "auto" and stream.isatty())
    common: list[structlog.typing.Processor] = [
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    render: list[structlog.typing.Processor] = [
        _redact_values,
        *(_console_processors(stream.isatty()) if console else _json_processors()),
        _redact_text,
    ]
    structlog.configure(
        processors=[_add_name, *common, *render],
        logger_factory=lambda name="": _Output(stream, name),
        # A cached logger would keep the level of its first line.
        cache_logger_on_first_use=False,
    )
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[
                structlog.stdlib.add_logger_name,
                *common,
                structlog.stdlib.ExtraAdder(),
            ],
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    logging.captureWarnings(True)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)
    set_level(level)


def set_level(level: str) -> None:
    """Set the lowest level that is logged. Raises ValueError for an unknown level."""
    if level not in LEVELS:
        raise ValueError(f"{level!r} is not a log level: it must be one of {', '.join(LEVELS)}")
    logging.getLogger().setLevel(level.upper())
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(level))


class _Output:
    """Writes the rendered lines of one logger. A stream that fails loses lines, not the process."""

    def __init__(self, stream: TextIO, name: str) -> None:
        self.name = name
        self._stream = stream

    def write(self, line: str) -> None:
        """Write a line without its end."""
        with suppress(OSError, ValueError):
            self._stream.write(f"{line}\n")
            self._stream.flush()

    debug = info = warning = error = critical = write


def _add_name(logger: _Output, method: str, event: _Event) -> _Event:
    if logger.name:
        event["logger"] = logger.name
    return event


def _json_processors() -> tuple[structlog.typing.Processor, ...]:
    return (
        structlog.processors.format_exc_info,
        structlog.processors.EventRenamer("message"),
        structlog.processors.JSONRenderer(serializer=_encode),
    )


def _console_processors(colours: bool) -> tuple[structlog.typing.Processor, ...]:
    plain = structlog.dev.plain_traceback
    return (
        structlog.dev.ConsoleRenderer(
            colors=colours, timestamp_key="time", exception_formatter=plain
        ),
    )


def _encode(event: _Event, default: object) -> str:
    first = {key: event[key] for key in ("time", "level", "message") if key in event}
    return _encoder.encode({**first, **event}).decode()


def _redact_values(logger: object, method: str, event: _Event) -> _Event:
    for key, value in event.items():
        event[key] = _redact_value(key, value)
    return event


def _redact_value(key: str, value: object) -> object:
    if isinstance(value, dict):
        return {name: _redact_value(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(key, inner) for inner in value]
    return REDACTED if isinstance(value, str | bytes) and names_secret(key) else value


@lru_cache(maxsize=1024)
def names_secret(key: str) -> bool:
    """Whether a value with this key, such as `password`, is not to be logged."""
    return _SECRET_KEY.search(key) is not None


def _redact_text(logger: object, method: str, line: Any) -> str:  # noqa: ANN401 a processor
    lowered = line.lower()
    if any(hint in lowered for hint in _SECRET_HINTS):
        return _SECRET_TEXT.sub(_replacement, line)
    return str(line)


def _replacement(match: re.Match[str]) -> str:
    return (match["scheme"] or match["user"] or match["query"] or "") + REDACTED
