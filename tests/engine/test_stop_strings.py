from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from engine.stop_strings import StopStrings


def feed(pieces: list[str], strings: list[str], *, include: bool = False) -> tuple[str, str | None]:
    stop = StopStrings(strings, include=include)
    text = ""
    for piece in pieces:
        text += stop.push(piece)
        if stop.found is not None:
            return text, stop.found
    return text + stop.flush(), None


def test_the_text_before_the_stop_string() -> None:
    assert feed(["Paris", ".\n", "\nThe"], ["\n\n"]) == ("Paris.", "\n\n")
    assert feed(["Paris", ".\n", "\nThe"], ["\n\n"], include=True) == ("Paris.\n\n", "\n\n")


def test_text_that_may_begin_a_stop_string_is_held_back() -> None:
    stop = StopStrings(["</s>"])
    assert stop.push("a <") == "a "
    assert stop.push("/") == ""
    assert stop.push("p> <") == "</p> "
    assert stop.flush() == "<"
    assert stop.found is None


def test_overlapping_beginnings() -> None:
    assert feed(list("aaab"), ["aab"]) == ("a", "aab")


def test_the_string_that_is_complete_first_counts() -> None:
    assert feed(["xabcd"], ["abcd", "bc"]) == ("xa", "bc")
    assert feed(["xabcd"], ["bc", "abc"]) == ("x", "abc"), "of two that end together the longer"


def test_without_strings_everything_passes() -> None:
    stop = StopStrings([])
    assert stop.push("anything") == "anything"
    assert stop.flush() == ""


def test_text_that_is_not_searched_passes_unseen() -> None:
    stop = StopStrings(["ab"])
    assert stop.push("xab", search=False) == "xab"
    assert stop.push("a") == ""
    assert stop.push("a", search=False) == "aa"
    assert stop.push("b") == "b"
    assert stop.found is None


alphabet = st.text("ab", max_size=12)


@given(st.lists(alphabet), st.lists(st.text("ab", min_size=1, max_size=4), min_size=1), st.booleans())
def test_pieces_do_not_matter(pieces: list[str], strings: list[str], include: bool) -> None:
    whole = "".join(pieces)
    outcome = feed(pieces, strings, include=include)
    assert outcome == feed(list(whole), strings, include=include)
    # The first place at which a stop string ends, found by looking at every beginning of the text.
    for end in range(len(whole) + 1):
        ending = [string for string in strings if whole[:end].endswith(string)]
        if ending:
            longest = max(ending, key=len)
            assert outcome == (whole[: end if include else end - len(longest)], longest)
            return
    assert outcome == (whole, None)
