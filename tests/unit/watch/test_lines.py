"""Chunks of bytes become the same lines, wherever the network cuts them."""

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from torchrun_controller.watch.lines import MAX_LINE, LineSplitter, Overlong


def cut(text: bytes, cuts: list[int]) -> list[bytes]:
    places = sorted({0, len(text), *(each % (len(text) + 1) for each in cuts)})
    return [text[start:end] for start, end in itertools.pairwise(places)]


def split(chunks: list[bytes], limit: int = MAX_LINE) -> list[bytes | Overlong]:
    splitter = LineSplitter(limit)
    return [line for chunk in chunks for line in splitter.feed(chunk)]


@settings(deadline=None)
@given(
    st.lists(st.binary(max_size=12).map(lambda each: each.replace(b"\n", b"")), max_size=8),
    st.binary(max_size=5).map(lambda each: each.replace(b"\n", b"")),
    st.lists(st.integers(min_value=0), max_size=12),
)
def test_any_chunking_gives_the_same_lines(
    lines: list[bytes], unended: bytes, cuts: list[int]
) -> None:
    text = b"".join(line + b"\n" for line in lines) + unended
    assert split(cut(text, cuts)) == [line for line in lines if line]


@settings(deadline=None)
@given(
    st.lists(st.integers(min_value=0, max_value=30), max_size=6),
    st.lists(st.integers(min_value=0), max_size=12),
)
def test_a_line_over_the_limit_does_not_affect_others(sizes: list[int], cuts: list[int]) -> None:
    lines = [bytes([65 + number]) * size for number, size in enumerate(sizes)]
    text = b"".join(line + b"\n" for line in lines)

    parts = split(cut(text, cuts), limit=10)

    assert len(parts) == len([line for line in lines if line])
    for got, line in zip(parts, [line for line in lines if line], strict=True):
        if len(line) <= 10:
            assert got == line
        else:
            # The first bytes, up to the limit, stay: the name of the object is read from them.
            assert isinstance(got, Overlong)
            assert len(got.head) > 10
            assert line.startswith(got.head)


def test_a_line_over_the_limit_is_reported_before_it_ends() -> None:
    splitter = LineSplitter(limit=10)
    assert splitter.feed(b"x" * 11) == [Overlong(b"x" * 11)]
    assert splitter.feed(b"x" * 11) == []
    assert splitter.feed(b"x\nnext\n") == [b"next"]


def test_the_limit_lets_any_object_of_etcd_pass() -> None:
    line = b"x" * (15 * 2**20)
    assert split([line, b"\n"]) == [line]
