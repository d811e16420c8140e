"""Events, against the standard's examples and its rules applied to the whole text at once."""

from __future__ import annotations

import re

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from app.sse import EventDecoder, EventTooLargeError


def events(*pieces: bytes, **limits: int) -> list[bytes]:
    decoder = EventDecoder(**limits)
    return [data for piece in pieces for data in decoder.feed(piece)]


def by_the_rules(body: bytes) -> list[bytes]:
    """The data of `body`'s events, as WHATWG HTML 9.2.6 says; those with empty data left out."""
    found, data = [], b""
    # What follows the last line end is an incomplete line.
    for line in re.split(rb"\r\n|\n|\r", body.removeprefix(b"\xef\xbb\xbf"))[:-1]:
        if not line:
            if data.removesuffix(b"\n"):
                found.append(data.removesuffix(b"\n"))
            data = b""
        elif match := re.fullmatch(rb"data(?:: ?(.*))?", line, re.DOTALL):
            data += (match[1] or b"") + b"\n"
    return found


@pytest.mark.parametrize(
    ("body", "expected"),
    [
        (b"data: YHOO\ndata: +2\ndata: 10\n\n", [b"YHOO\n+2\n10"]),
        (b": test stream\n\ndata: first event\nid: 1\n\ndata:second event\nid\n\ndata:  third event",
         [b"first event", b"second event"]),
        (b"data:test\n\ndata: test\n\n", [b"test", b"test"]),
        (b"data\n\ndata\ndata\n\ndata:", [b"\n"]),
        (b"event: add\r\ndata: 1\r\n\r\n", [b"1"]),
        ("data: a\u2028b\u0085c\u000bd\n\n".encode(), ["a\u2028b\u0085c\u000bd".encode()]),
        (b"\xef\xbb\xbfdata: 1\n\n\xef\xbb\xbfdata: 2\n\n", [b"1"]),
    ],
)  # fmt: skip
def test_examples(body: bytes, expected: list[bytes]) -> None:
    assert events(body) == expected
    assert events(*(bytes([byte]) for byte in body)) == expected


LINES = st.sampled_from(
    [b"data", b":", b" ", b"id: 4", b"{}", b"\n", b"\r", b"\r\n", b"\xef\xbb\xbf", b"\xe2\x80\xa8"]
)


@given(st.lists(st.lists(LINES, max_size=12).map(b"".join), max_size=12))
@example([b"data: a\r", b"\n\r", b"\n"])
@example([b"data: a\r", b"", b"\n\n"])
def test_wherever_the_bytes_are_cut(pieces: list[bytes]) -> None:
    assert events(*pieces) == by_the_rules(b"".join(pieces))


def test_an_event_that_never_ends_is_refused() -> None:
    assert events(b"data: 1234\n\n" * 100, max_bytes=16) == [b"1234"] * 100
    assert events(b": 1234\n" * 100, max_bytes=16) == []
    with pytest.raises(EventTooLargeError):
        events(*[b"data: 12"] * 3, max_bytes=16)
    with pytest.raises(EventTooLargeError):
        events(*[b"data: 1\n"] * 10, max_bytes=16)
