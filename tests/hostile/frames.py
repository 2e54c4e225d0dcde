"""Malformed watch frames, derived from valid ones."""

import json
import random
from collections.abc import Callable

from hostile.values import ANY, BOMBS, NUMBERS, anywhere_else, changed, nested
from torchrun_api.json import JsonObject, JsonValue
from torchrun_controller.watch.lines import MAX_LINE

VICTIMS = 8  # the only objects that the frames name
TYPES = ("ADDED", "MODIFIED", "DELETED", "BOOKMARK")
_ODD_TYPES: tuple[JsonValue, ...] = (
    "",
    "added",
    "ADDED ",
    "GONE",
    "ERR\x00R",
    "💥",
    None,
    1,
    [],
    {},
    True,
    "A" * 10_000,
)
_CODES: tuple[JsonValue, ...] = (410, 429, 500, 0, -1, 200, 2**63, 10**400, "410", None, 1.5)
_TEXTS: tuple[JsonValue, ...] = ("Expired", "", "💥", "x" * 10_000, None, 7, [], {})
_VERSIONS: tuple[JsonValue, ...] = (
    *("", "0", "-1", " 7", "1_0", "٣", "9" * 5000, "0x1f"),
    *(7, None, [], 1e9),
)
_ITEMS: tuple[JsonValue, ...] = (None, {}, "x", [None], [[]], [1])
_LARGE = 1.5 * 2**20  # the maximum size of an object in etcd
_HUGE = 0.0002  # share of those lines: each is 1.5 to 17 MB

Maker = Callable[[random.Random, JsonObject], bytes]


def line(chance: random.Random, real: list[JsonObject]) -> bytes:
    """One line without its newline. `real`: valid objects."""
    if chance.random() < _HUGE:
        return _huge(chance, chance.choice(real))
    return chance.choice(_MAKERS)(chance, chance.choice(real))


def _text(value: JsonValue) -> bytes:
    return json.dumps(value, separators=(",", ":"), ensure_ascii=False).encode(
        errors="surrogatepass"
    )


def _frame(chance: random.Random, obj: JsonValue, kind: JsonValue = "") -> JsonObject:
    return {"type": kind or chance.choice(TYPES), "object": obj}


def _truncated(chance: random.Random, obj: JsonObject) -> bytes:
    whole = _text(_frame(chance, obj))
    return whole[: chance.randrange(1, len(whole))]


def _mutated(chance: random.Random, obj: JsonObject) -> bytes:
    """A few bytes are changed."""
    text = bytearray(_text(_frame(chance, obj)))
    for _ in range(chance.randint(1, 6)):
        at = chance.randrange(len(text))
        match chance.randrange(3):
            case 0:
                text[at] = chance.randrange(256)
            case 1:
                del text[at : at + chance.randint(1, 8)]
            case _:
                text[at:at] = chance.choice(
                    (b"{", b"[", b'"', b",", b"null", b"\xff", b"\\u", b"9")
                )
        if not text:
            break
    return bytes(text).replace(b"\n", b" ")


def _wrong_types(chance: random.Random, obj: JsonObject) -> bytes:
    """Some values in the object have other types or are missing."""
    return _text(_frame(chance, changed(chance, obj, anywhere_else, chance.randint(1, 4))))


def _numbers(chance: random.Random, obj: JsonObject) -> bytes:
    """Numbers out of range, also in place of other types."""
    number = chance.choice(NUMBERS)
    text = _text(_frame(chance, changed(chance, obj, lambda _: "@", 1)))
    return text.replace(b'"@"', number.encode())


def _versions(chance: random.Random, obj: JsonObject) -> bytes:
    meta = obj["metadata"]
    assert isinstance(meta, dict)
    version = chance.choice(_VERSIONS)
    return _text(_frame(chance, {**obj, "metadata": {**meta, "resourceVersion": version}}))


def _bombs(chance: random.Random, obj: JsonObject) -> bytes:
    """Nesting beyond the depth of any parser, closed or not."""
    text = _text(_frame(chance, changed(chance, obj, lambda _: "@", 1)))
    return text.replace(b'"@"', chance.choice(BOMBS))


def _bad_utf8(chance: random.Random, obj: JsonObject) -> bytes:
    text = _text(_frame(chance, changed(chance, obj, lambda _: "@", 1)))
    bad = chance.choice(
        (b"\xff", b"\xc3", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\x00", b"\\ud800")
    )
    return text.replace(b'"@"', b'"' + bad * chance.randint(1, 5) + b'"')


def _types(chance: random.Random, obj: JsonObject) -> bytes:
    return _text(_frame(chance, obj, chance.choice(_ODD_TYPES) or "odd"))


def _parts(chance: random.Random, obj: JsonObject) -> bytes:
    """Parts of the frame are missing, repeated or random."""
    match chance.randrange(6):
        case 0:
            return _text({"type": chance.choice(TYPES)})
        case 1:
            return _text({"object": obj})
        case 2:
            return _text({"type": chance.choice(TYPES), "object": chance.choice(ANY)})
        case 3:
            return _text(chance.choice(ANY))
        case 4:
            whole = _text(_frame(chance, obj))
            return whole[:-1] + b"," + whole[1:]
        case _:
            return _text(_frame(chance, {k: v for k, v in obj.items() if k != "metadata"}))


def _errors(chance: random.Random, obj: JsonObject) -> bytes:
    """ERROR frames, also with something other than a Status."""
    status: JsonObject = {
        "kind": "Status",
        "code": chance.choice(_CODES),
        "reason": chance.choice(_TEXTS),
        "message": chance.choice(_TEXTS),
        "details": {"retryAfterSeconds": chance.choice(_CODES)},
    }
    odd = chance.random() < 0.3
    return _text(
        _frame(chance, changed(chance, status, anywhere_else, 2) if odd else status, "ERROR")
    )


def _garbage(chance: random.Random, obj: JsonObject) -> bytes:
    return chance.randbytes(chance.randint(1, 200)).replace(b"\n", b" ")


def _huge(chance: random.Random, obj: JsonObject) -> bytes:
    """As large as etcd accepts, or larger than a line may be."""
    size = round(chance.choice((_LARGE, _LARGE, MAX_LINE + 2**20)))
    match chance.randrange(3):
        case 0:
            value: JsonValue = {"annotations": {"a": "x" * size}}
        case 1:
            value = [0] * (size // 2)
        case _:
            value = nested(900)
    meta = obj["metadata"]
    assert isinstance(meta, dict)
    padded = {**obj, "metadata": {**meta, "labels": value}, "padding": "x" * size}
    return _text(_frame(chance, padded))


_MAKERS: tuple[Maker, ...] = (
    *(_truncated, _mutated, _mutated, _wrong_types, _wrong_types, _numbers, _versions),
    *(_bombs, _bad_utf8, _types, _parts, _errors, _garbage),
)


def page(chance: random.Random, real: list[JsonObject]) -> bytes:
    """A response to a list that is invalid or has invalid items."""
    items = [changed(chance, chance.choice(real), anywhere_else, 2) for _ in range(4)]
    whole: JsonObject = {"metadata": {"resourceVersion": "7", "continue": ""}, "items": [*items]}
    match chance.randrange(7):
        case 0:
            return _text({**whole, "items": chance.choice(_ITEMS)})
        case 1:
            return _text({**whole, "metadata": chance.choice(ANY)})
        case 2:
            return _text(changed(chance, whole, anywhere_else, 2))
        case 3:
            return _text(whole)[: chance.randint(0, 200)]
        case 4:
            return _text(chance.choice(ANY))
        case 5:
            return chance.choice(BOMBS)
        case _:
            return _text({**whole, "metadata": {"resourceVersion": "7", "continue": "more"}})
