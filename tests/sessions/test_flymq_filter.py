"""Filters: what passes, and that no pattern can hold the broker up."""

from __future__ import annotations

import re
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.sessions.flymq_filter import build, passing
from headrace.sessions.flymq_patterns import NotRegular, Pattern

PATTERNS = [
    "abc",
    "a.c",
    "^abc$",
    "^a|b$",
    "(ab)+c",
    "(?:ab){2,3}c",
    "a{2}",
    "a{2,}b",
    "a{0,2}b",
    "[a-c]+[^a-c]",
    "[]a]+x",
    "[a\\]]b",
    "[\\d_]+x",
    "\\d+-\\w+\\s\\S",
    "a*?b",
    "(a|b|)c",
    "(a*)*b",
    "(|a)+b",
    "\\.\\*",
    "$",
    "^",
    "x$|^y",
    "",
    "(?i)aBc[D-f]",
    "é+",
    "a-z[a-]",
]
ALPHABET = st.text(alphabet="abcxyzABC019_-. é\n*]", max_size=24)


@pytest.mark.parametrize("pattern", PATTERNS)
@given(text=ALPHABET)
@settings(max_examples=80)
def test_a_pattern_finds_what_the_standard_library_finds(pattern: str, text: str) -> None:
    encoded = text.encode()
    expected = re.search(pattern.encode().replace(b"$", rb"\Z"), encoded) is not None
    assert Pattern(pattern).search(encoded) is expected
    used = Pattern(pattern)
    for _ in range(2):
        assert used.search(encoded) is expected, "what a pattern has learnt must not change its answer"


@given(st.text(alphabet="ab|()*+?[]^{}1,2\\d.-", max_size=14), st.text(alphabet="ab12", max_size=10))
@settings(max_examples=400)
def test_any_text_is_a_pattern_of_the_standard_library_too_or_is_refused(text: str, subject: str) -> None:
    try:
        pattern = Pattern(text)
    except NotRegular:
        return
    try:
        reference = re.compile(text.encode())
    except re.error:
        pytest.fail(f"{text!r} was taken for a pattern")
    assert pattern.search(subject.encode()) is (reference.search(subject.encode()) is not None)


@pytest.mark.parametrize(
    "pattern",
    [
        "(",
        ")",
        "a)",
        "[",
        "[a",
        "*",
        "^*",
        "$?",
        "a**",
        "a{",
        "a{x}",
        "a{3,2}",
        "a{2000}",
        "\\",
        "\\b",
        "\\1",
        "(?=a)",
        "(?P<n>a)",
        "[z-a]",
        "[é]",
    ],
)
def test_what_is_not_regular_is_refused(pattern: str) -> None:
    with pytest.raises(NotRegular):
        Pattern(pattern)


@pytest.mark.parametrize("pattern", ["a{300}", "((a{9}){9}){9}", "((){999}){999}", "(" * 40 + ")" * 40, "x" * 600])
def test_a_pattern_that_asks_for_too_much_is_refused(pattern: str) -> None:
    with pytest.raises(NotRegular):
        Pattern(pattern)


@pytest.mark.parametrize("pattern", ["(a*)*b", "(a|a)*b", "(a|aa)+b", "(.*)*x", "(a?){40}a{40}b", "(x+x+)+y"])
def test_patterns_that_ruin_backtracking_take_time_in_proportion_to_the_text(pattern: str) -> None:
    began = time.process_time()
    assert not Pattern(pattern).search(b"a" * 20_000)
    assert time.process_time() - began < 5


def test_sets_of_states_are_forgotten_before_they_fill_the_memory() -> None:
    pattern = Pattern("(a|b)*a(a|b){12}x")
    text = bytes(b"ab"[(number * 2_654_435_761 >> 7) & 1] for number in range(30_000))
    assert not pattern.search(text)
    assert len(pattern._sets) <= 1_001
    assert pattern.search(text + b"a" + b"b" * 12 + b"x")


@pytest.mark.parametrize(
    ("text", "passes", "fails"),
    [
        ("error", [b"an ERROR here", b"Error"], [b"erro", b""]),
        ("größe", ["GRÖSSE GRÖßE".encode()], [b"grosse"]),
        ("user-[0-9]+", [b"user-17", b"USER-[0-9]+"], [b"user-x"]),
        ("a(b", [b"xA(By"], [b"ab"]),
        ("$.user.id", [b'{"user":{"id":null}}', b' {"user": {"id": 1, "x": 2}}'], [b'{"user":1}', b"[]", b"$.user.id", b"{", b"\xff"]),
        ("$.", [b'{"":1}'], [b"{}"]),
    ],
)
def test_a_filter_lets_pass_what_it_describes(text: str, passes: list[bytes], fails: list[bytes]) -> None:
    test = build(text)
    assert test is not None
    assert [value for value in passes + fails if test(value)] == passes


def test_an_empty_filter_is_none() -> None:
    assert build("") is None


def test_keys_pass_as_values_do() -> None:
    test = build("eu")
    assert test is not None
    assert passing(test, [b"order-EU", None, b"us"], [b"1", b"eu", b"3"]) == [0, 1]
    assert passing(test, None, [b"1", b"eu", b"3"]) == [1]


def test_json_nested_too_deeply_does_not_pass() -> None:
    test = build("$.a")
    assert test is not None
    assert not test(b'{"a":' * 100_000)
    assert not test(b"[" * 100_000)
