"""Offsets as JSON: one order, strict parsing."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ConfigError
from headrace.spark.offsets import from_json, nested, parse_assignment, parse_offsets, to_json

OFFSETS = st.dictionaries(st.tuples(st.text(min_size=1, max_size=8), st.integers(0, 999)), st.integers(0, 1 << 62), max_size=20)


@given(OFFSETS, st.randoms(use_true_random=False))
def test_the_same_offsets_are_always_the_same_text(offsets: dict[tuple[str, int], int], random: object) -> None:
    shuffled = list(offsets.items())
    random.shuffle(shuffled)  # type: ignore[attr-defined]  # hypothesis hands out a Random
    assert json.dumps(to_json(dict(shuffled))) == json.dumps(to_json(offsets))


@given(OFFSETS)
def test_what_is_written_is_read_back(offsets: dict[tuple[str, int], int]) -> None:
    assert from_json(json.loads(json.dumps(to_json(offsets)))) == offsets


def test_partitions_are_in_the_order_of_their_numbers() -> None:
    assert json.dumps(to_json({("b", 10): 1, ("b", 9): 2, ("a", 0): 3})) == '{"a": {"0": 3}, "b": {"9": 2, "10": 1}}'


def test_the_flight_endpoint_gets_numbers() -> None:
    assert nested({("b", 10): 1, ("a", 0): 3, ("b", 9): 2}) == {"b": {10: 1, 9: 2}, "a": {0: 3}}


def test_a_user_writes_offsets_as_for_kafka() -> None:
    assert parse_offsets("startingOffsets", '{"t":{"0":23,"1":-2,"2":-1}}', least=-2) == {("t", 0): 23, ("t", 1): -2, ("t", 2): -1}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[1]", "not \\[1\\]"),
        ("{}", "not {}"),
        ('{"t":', 'not {"t":'),
        ('{"t":5}', '"t" has 5'),
        ('{"t":{"x":1}}', 'a partition "x"'),
        ('{"t":{"0":"1"}}', 'partition 0 of "t" has "1"'),
        ('{"t":{"0":true}}', 'partition 0 of "t" has true'),
        ('{"t":{"0":1.5}}', "has 1.5"),
        ('{"t":{"0":-3}}', "has -3"),
    ],
)
def test_anything_else_is_rejected_with_an_example(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=f'option startingOffsets: expected JSON such as {{"orders":{{"0":23,"1":7}}}}.*{message}'):
        parse_offsets("startingOffsets", text, least=-2)


def test_an_assignment_lists_partitions() -> None:
    assert parse_assignment('{"t":[1,0,1],"u":[7]}') == {"t": (0, 1), "u": (7,)}


@pytest.mark.parametrize("text", ["t", "{}", '{"t":[]}', '{"t":0}', '{"t":["0"]}', '{"t":[-1]}', '{"t":[true]}'])
def test_an_assignment_of_nothing_or_of_no_numbers_is_rejected(text: str) -> None:
    with pytest.raises(ConfigError, match='option assign: expected JSON such as {"orders":\\[0,1\\]}'):
        parse_assignment(text)
