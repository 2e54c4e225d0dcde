"""Parsers of the values of settings. Each raises ValueError, or KeyError for `boolean`."""

import ipaddress
import re
from collections.abc import Callable
from pathlib import Path
from urllib.parse import urlsplit

NAME = re.compile(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?")
SUBDOMAIN = re.compile(
    r"(?=.{1,253}$)[a-z0-9]([-a-z0-9]*[a-z0-9])?(\.[a-z0-9]([-a-z0-9]*[a-z0-9])?)*"
)
# https://github.com/distribution/reference: [host[:port]/]path[:tag][@digest]
IMAGE = re.compile(
    r"([A-Za-z0-9.-]+(:[0-9]+)?/)?[a-z0-9]+([._/-]+[a-z0-9]+)*"
    r"(:[A-Za-z0-9_][A-Za-z0-9_.-]{0,127})?(@[a-z0-9]+:[0-9a-f]{32,})?"
)
# Empty, or host:port with a name, an IPv4 address or an IPv6 address in brackets.
ENDPOINT = re.compile(r"((\[[0-9A-Fa-f:.]+\]|[A-Za-z0-9]([-A-Za-z0-9.]*[A-Za-z0-9])?):[0-9]{1,5})?")
_DURATION = re.compile(r"([0-9]+(?:\.[0-9]+)?)(ms|s|m|h)?")
_UNITS = {"ms": 0.001, "": 1.0, "s": 1.0, "m": 60.0, "h": 3600.0}


def matching(pattern: re.Pattern[str]) -> Callable[[str], str]:
    """Accept text that the pattern matches completely."""

    def parse(text: str) -> str:
        if pattern.fullmatch(text) is None:
            raise ValueError
        return text

    return parse


def one_of(*words: str) -> Callable[[str], str]:
    """Accept one of these words."""
    return matching(re.compile("|".join(words)))


def name_list(text: str) -> tuple[str, ...]:
    """Parse names of namespaces, separated by commas, without duplicates."""
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not all(NAME.fullmatch(name) for name in names):
        raise ValueError
    return tuple(dict.fromkeys(names))


def integer(low: int, high: int) -> Callable[[str], int]:
    """Parse an integer within these bounds."""

    def parse(text: str) -> int:
        if not (text.isascii() and text.isdigit()) or not low <= int(text) <= high:
            raise ValueError
        return int(text)

    return parse


def boolean(text: str) -> bool:
    """Parse true or false, in any case."""
    return {"true": True, "false": False}[text.lower()]


def seconds(text: str) -> float:
    """Parse a duration such as 15s or 500ms; a number alone is in seconds."""
    match = _DURATION.fullmatch(text)
    if match is None:
        raise ValueError
    return float(match[1]) * _UNITS[match[2] or ""]


def existing_file(text: str) -> str | None:
    """Accept the path of a file; "" is None."""
    if text and not Path(text).is_file():
        raise ValueError
    return text or None


def ip_address(text: str) -> str:
    """Accept an IP address or ""."""
    if text:
        ipaddress.ip_address(text)
    return text


def base_url(text: str) -> str:
    """Accept an http or https URL without query and credentials, or ""; drop final slashes."""
    if text:
        parts = urlsplit(text)
        if parts.scheme not in ("http", "https") or not parts.hostname or parts.port == 0:
            raise ValueError
        if parts.query or parts.fragment or parts.username or parts.password:
            raise ValueError
    return text.rstrip("/")
