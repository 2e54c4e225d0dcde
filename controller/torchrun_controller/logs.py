"""Structured logs on standard error: one JSON object a line, or coloured lines on a terminal.

    configure("info", "auto")
    log = structlog.get_logger()
    log.info("job started", job="team-a/train", attempt=0)

All records go through the standard library's root logger: ours, and those of dependencies, asyncio
and `warnings`. So there is one format, one level (`set_level` at run time) and one place that
redacts credentials: values whose key names a credential, and text that looks like one, also in
tracebacks. Tracebacks never show local variables.
"""

import logging
import re
import sys
from collections.abc import MutableMapping
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
    r"|(?P<query>[?&](?:X-Amz-Signature|X-Amz-Security-Token|[\w-]*token|sig|signature)=)[^&\s\"']+",
    re.I,
)

_Event = MutableMapping[str, Any]


def configure(level: LogLevel, format: LogFormat, stream: TextIO | None = None) -> None:
    """Configure logging for the process; `auto` means console if the stream is a terminal."""
    stream = sys.stderr if stream is None else stream
    console = format == "console" or (format == "auto" and stream.isatty())
    common: list[structlog.typing.Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.stdlib.PositionalArgumentsFormatter(),
        structlog.stdlib.ExtraAdder(),
        structlog.processors.TimeStamper(fmt="iso", utc=True, key="time"),
        structlog.processors.StackInfoRenderer(),
    ]
    handler = logging.StreamHandler(stream)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=[*common],
            processors=[
                structlog.stdlib.ProcessorFormatter.remove_processors_meta,
                _redact_values,
                *(_console_processors(stream.isatty()) if console else _json_processors()),
                _redact_text,
            ],
        )
    )
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *common,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        wrapper_class=structlog.stdlib.BoundLogger,
        logger_factory=structlog.stdlib.LoggerFactory(),
        cache_logger_on_first_use=True,
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
        raise ValueError(f"{level!r} is no log level: it must be one of {', '.join(LEVELS)}")
    logging.getLogger().setLevel(level.upper())


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
    ordered = {**first, **event}
    return msgspec.json.encode(ordered, enc_hook=repr).decode()


def _redact_values(logger: object, method: str, event: _Event) -> _Event:
    for key, value in event.items():
        event[key] = _redact_value(key, value)
    return event


def _redact_value(key: str, value: object) -> object:
    if isinstance(value, dict):
        return {name: _redact_value(str(name), inner) for name, inner in value.items()}
    if isinstance(value, list | tuple):
        return [_redact_value(key, inner) for inner in value]
    return REDACTED if isinstance(value, str | bytes) and _SECRET_KEY.search(key) else value


def _redact_text(logger: object, method: str, line: Any) -> str:  # noqa: ANN401 a processor
    return _SECRET_TEXT.sub(_replacement, line)


def _replacement(match: re.Match[str]) -> str:
    return (match["scheme"] or match["user"] or match["query"] or "") + REDACTED
