from __future__ import annotations

import random
import secrets

import pytest

from moe_runtime.front.stop_strings import StopStrings


def feed(stops, pieces, *, include=False):
    finder = StopStrings(stops, include=include)
    given = [finder.push(piece) for piece in pieces]
    if finder.found is None:
        given.append(finder.flush())
    return "".join(given), finder.found


def by_character(stops, text):
    """The specification: read on until the text so far ends in a stop string."""
    for end in range(1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            longest = max(ending, key=len)
            return text[: end - len(longest)], longest
    return text, None


@pytest.mark.parametrize(
    ("stops", "pieces", "given", "found"),
    [
        (["END"], ["some E", "N", "D more"], "some ", "END"),
        (["END"], ["some E", "N", "ding"], "some ENding", None),
        (["\n\n"], ["a\n", "b\n", "\nc"], "a\nb", "\n\n"),
        (["aab"], ["aa", "aab"], "aa", "aab"),
        (["abcX", "b"], ["abcX"], "a", "b"),
        (["cd", "bcd"], ["ab", "c", "d"], "a", "bcd"),
        ([], ["any", "thing"], "anything", None),
        (["日本"], ["das 日", "本"], "das ", "日本"),
    ],
)
def test_examples(stops, pieces, given, found):
    assert feed(stops, pieces) == (given, found)


def test_the_stop_string_can_be_included():
    assert feed(["END"], ["so", "me E", "NDless"], include=True) == ("some END", "END")


def test_nothing_comes_after_the_end():
    finder = StopStrings(["x"])
    assert finder.push("axb") == "a"
    assert finder.push("more") == ""


@pytest.mark.parametrize("seed", [secrets.randbits(32)])
def test_any_cut_of_any_text_gives_the_same(seed):
    rng = random.Random(seed)
    for _ in range(3000):
        text = "".join(rng.choices("abc", k=rng.randint(0, 30)))
        stops = ["".join(rng.choices("abc", k=rng.randint(1, 5))) for _ in range(rng.randint(0, 3))]
        pieces, rest = [], text
        while rest:
            size = rng.randint(1, 4)
            pieces.append(rest[:size])
            rest = rest[size:]
        finder = StopStrings(stops)
        given = ""
        expected, found = by_character(stops, text)
        for piece in pieces:
            given += finder.push(piece)
            assert expected.startswith(given), "part of a stop string was given out"
        if finder.found is None:
            given += finder.flush()
        assert (given, finder.found) == (expected, found)
