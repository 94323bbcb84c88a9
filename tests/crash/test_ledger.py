"""Tests of the ledger: it must reject a history for each broken guarantee."""

from __future__ import annotations

import pytest

from tests.crash.ledger import BrokenPromise, Ledger, Sent, compose, decompose


def value(connection: int, sequence: int, topic: str = "t", client: int = 1) -> bytes:
    return compose(topic, client, Sent(connection, sequence), b"filler with spaces \n")


def ledger(*acked: int) -> Ledger:
    """Client 1 sent 1, 2, 3 on its first connection and 2, 3, 4 on its second."""
    book = Ledger(["t"])
    for sent in (Sent(1, 1), Sent(1, 2), Sent(1, 3), Sent(2, 2), Sent(2, 3), Sent(2, 4)):
        book.note_sent(1, "t", sent)
    for sequence in acked:
        book.note_acked(1, "t", sequence)
    return book


def test_a_value_tells_who_sent_it() -> None:
    assert decompose("t", value(3, 7)) == (1, Sent(3, 7))


@pytest.mark.parametrize(
    ("acked", "kept"),
    [
        ((), []),
        ((), [value(1, 1)]),
        ((1,), [value(1, 1), value(1, 2)]),
        ((1, 2, 3, 4), [value(1, 1), value(1, 2), value(1, 3), value(2, 2), value(2, 3), value(2, 4)]),
        ((1, 2, 3, 4), [value(1, 1), value(2, 2), value(2, 3), value(2, 4)]),
    ],
)
def test_a_kept_promise_passes(acked: tuple[int, ...], kept: list[bytes]) -> None:
    ledger(*acked).check("t", kept)


@pytest.mark.parametrize(
    ("acked", "kept", "why"),
    [
        ((1,), [], "lost"),
        ((1, 2), [value(1, 1), value(1, 3)], "lost"),
        ((4,), [value(1, 1), value(1, 2), value(1, 3)], "lost"),
        ((), [value(1, 1), value(1, 1)], "twice"),
        ((), [value(1, 2), value(1, 1)], "stands behind"),
        ((), [value(2, 2), value(1, 1)], "stands behind"),
        ((), [value(1, 4)], "never sent"),
        ((), [value(1, 1, client=2)], "never sent"),
        ((), [value(1, 1, topic="other")], "is not what"),
        ((), [value(1, 1)[:-1]], "is not what"),
        ((), [b""], "never sent"),
        ((), [bytes(40)], "never sent"),
    ],
)
def test_a_broken_promise_is_named(acked: tuple[int, ...], kept: list[bytes], why: str) -> None:
    with pytest.raises(BrokenPromise, match=why):
        ledger(*acked).check("t", kept)


def test_what_a_reader_saw_stays() -> None:
    book = ledger()
    book.check("t", [value(1, 1), value(1, 2)])
    book.check("t", [value(1, 1), value(1, 2), value(1, 3)])
    with pytest.raises(BrokenPromise, match="now it is gone"):
        book.check("t", [value(1, 1), value(1, 2)])
