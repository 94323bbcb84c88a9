"""Tests of the checker: it must name each anomaly in a constructed history."""

from __future__ import annotations

import pytest

from tests.consistency.history import Commit, Delivery, Event, History, Position, Read, Restart, Settlement, Unit, anomalies

A, B = ("t", "a"), ("t", "b")
PAIR = (("t", "x"), ("u", "y"))


def unit(number: int, *values: tuple[str, str], outcome: str = "ok", producer: str = "p") -> Unit:
    assert outcome in ("ok", "fail", "unknown")
    return Unit(producer, number, values, outcome)  # type: ignore[arg-type]  # asserted above


def read(*values: str, topic: str = "t", partition: int = 0) -> Read:
    return Read((topic, partition), tuple(range(len(values))), values)


def named(*events: Event) -> set[str]:
    return {text.partition(":")[0] for text in anomalies(History(list(events)))}


GOOD: list[tuple[Event, ...]] = [
    (),
    (unit(1, A), read("a")),
    (unit(1, A, outcome="unknown"), read()),
    (unit(1, A, outcome="unknown"), read("a")),
    (unit(1, A, outcome="fail"), read()),
    (unit(1, A), unit(2, B), read("a", "b")),
    (unit(1, A), unit(2, B, producer="q"), read("b", "a")),
    (unit(1, A), unit(2, B), read("b"), read("a", partition=1)),
    (unit(1, *PAIR), read("x"), read("y", topic="u")),
    (unit(1, *PAIR, outcome="unknown"), read(), read(topic="u")),
    (unit(1, A), unit(2, B), read("a"), read("a", "b")),
    (unit(1, A), Delivery(*A), Delivery(*A), Settlement(*A), read("a")),
    (unit(1, A), Delivery(*A), Settlement(*A), Restart(), Delivery(*A), read("a")),
    (Commit("g", 1, "ok"), Position("g", 1), Commit("g", 2), Position("g", 2), Position("g", 2)),
    (Position("g", None), Commit("g", 1), Position("g", None)),
]

BAD: list[tuple[str, tuple[Event, ...]]] = [
    ("lost", (unit(1, A), read())),
    ("lost", (unit(1, A), unit(2, B), read("b"))),
    ("lost", (unit(1, *PAIR), read("x"), read(topic="u"))),
    ("unexpected", (read("a"),)),
    ("unexpected", (unit(1, A), read("a"), read("a", topic="u"))),
    ("aborted", (unit(1, A, outcome="fail"), read("a"))),
    ("duplicate", (unit(1, A), read("a", "a"))),
    ("duplicate", (unit(1, A), read("a"), read("a", partition=1))),
    ("torn", (unit(1, *PAIR, outcome="unknown"), read("x"), read(topic="u"))),
    ("reordered", (unit(1, A), unit(2, B), read("b", "a"))),
    ("reordered", (unit(1, A, B), read("b", "a"))),
    ("changed", (unit(1, A), unit(2, B, producer="q"), read("a", "b"), read("b", "a"))),
    ("changed", (unit(1, A, outcome="unknown"), read("a"), read())),
    ("gap", (unit(1, A), unit(2, B), Read(("t", 0), (0, 2), ("a", "b")))),
    ("gap", (unit(1, A), Read(("t", 0), (1,), ("a",)))),
    ("undelivered", (unit(1, A), unit(2, B), Delivery(*A), read("a", "b"))),
    ("resurrected", (unit(1, A), Delivery(*A), Settlement(*A), Delivery(*A), read("a"))),
    ("resurrected", (unit(1, A), Restart(), Delivery(*A), Settlement(*A), Delivery(*A), read("a"))),
    ("regressed", (Commit("g", 2, "ok"), Commit("g", 1), Position("g", 1))),
    ("regressed", (Commit("g", 2, "ok"), Position("g", None))),
    ("regressed", (Commit("g", 2, "ok"), Position("g", 3))),
    ("regressed", (Commit("g", 1, "ok"), Commit("g", 2), Position("g", 2), Position("g", 1))),
]


@pytest.mark.parametrize("events", GOOD)
def test_a_history_that_may_have_been_passes(events: tuple[Event, ...]) -> None:
    assert named(*events) == set()


@pytest.mark.parametrize(("anomaly", "events"), BAD)
def test_a_planted_anomaly_is_named(anomaly: str, events: tuple[Event, ...]) -> None:
    assert anomaly in named(*events)
