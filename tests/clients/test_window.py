"""The window of unacknowledged records."""

from __future__ import annotations

import asyncio

import pytest

from headrace.clients.errors import ClientClosed, NotSent, OutcomeUnknown
from headrace.clients.window import NumberedBatch, NumberedWindow


async def entered(window: NumberedWindow, values: list[bytes]) -> NumberedBatch:
    entry = NumberedBatch("t", values, 0)
    await window.enter(entry)
    return entry


async def sent(window: NumberedWindow, values: list[bytes]) -> NumberedBatch:
    entry = await entered(window, values)
    entry.was_sent = True
    return entry


async def test_an_acknowledgement_covers_all_before_it_and_resolves_each_once() -> None:
    window = NumberedWindow(records_max=100, bytes_max=1_000)
    entries = [await sent(window, [b"v"]) for _ in range(4)]
    assert window.acknowledge(2) == 3
    assert [entry.done.done() for entry in entries] == [True, True, True, False]
    assert window.acknowledge(2) == window.acknowledge(0) == 0
    assert (window.records, list(window.unanswered())) == (1, entries[3:])


async def test_an_acknowledgement_inside_a_batch_leaves_its_rest() -> None:
    window = NumberedWindow(records_max=100, bytes_max=1_000)
    entry = await sent(window, [b"a", b"bb", b"ccc"])
    assert window.acknowledge(1) == 2
    assert (entry.first_seq, entry.last_seq, entry.values, entry.size_bytes) == (2, 2, [b"ccc"], 3)
    assert not entry.done.done()
    window.acknowledge(2)
    assert entry.done.done() and len(window) == 0


async def test_numbers_that_were_never_sent_are_not_believed() -> None:
    window = NumberedWindow(records_max=100, bytes_max=1_000)
    await sent(window, [b"v"])
    unsent = await entered(window, [b"w"])
    assert window.acknowledge(1 << 60) == 1
    assert not unsent.done.done()


@pytest.mark.parametrize("records_max, bytes_max", [(2, 1_000), (100, 2)])
async def test_who_finds_no_room_waits_and_enters_in_the_order_of_coming(records_max: int, bytes_max: int) -> None:
    window = NumberedWindow(records_max=records_max, bytes_max=bytes_max)
    for _ in range(2):
        await sent(window, [b"v"])
    waiting = [asyncio.ensure_future(sent(window, [b"%d" % index])) for index in range(5)]
    await asyncio.sleep(0.01)
    assert not any(task.done() for task in waiting)
    for seq in range(5):
        window.acknowledge(seq)
        await asyncio.wait_for(waiting[seq], 300)
    assert [(task.result().first_seq, task.result().values) for task in waiting] == [(index + 2, [b"%d" % index]) for index in range(5)]


async def test_a_batch_larger_than_the_window_enters_an_empty_one() -> None:
    window = NumberedWindow(records_max=2, bytes_max=10)
    entry = await sent(window, [bytes(100)] * 3)
    assert window.records == 3 and entry.last_seq == 2


async def test_closing_tells_what_was_sent_from_what_was_not() -> None:
    window = NumberedWindow(records_max=3, bytes_max=100)
    known, unsent = await sent(window, [b"a", b"b"]), await entered(window, [b"c"])
    waiting = asyncio.ensure_future(entered(window, [b"d"]))
    await asyncio.sleep(0)
    assert window.close() == (2, 1)
    with pytest.raises(OutcomeUnknown):
        await known.done
    with pytest.raises(NotSent):
        await unsent.done
    with pytest.raises(ClientClosed):
        await waiting
