"""Completions of flushes on the event loop."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator
from typing import Any

import pytest

from headrace.engine.completions import Completions
from headrace.records import Appended


@pytest.fixture
async def completions() -> AsyncIterator[Completions]:
    made = Completions(asyncio.get_running_loop())
    yield made
    made.close()


def _on_a_thread(completions: Completions, flushes: list[tuple[list[Any], list[int]]]) -> None:
    def work() -> None:
        for done, advanced in flushes:
            completions.deliver(done, advanced)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def test_the_completions_of_all_flushes_are_called_on_the_loop_in_order(completions: Completions) -> None:
    seen: list[tuple[str, threading.Thread]] = []
    all_done = asyncio.Event()

    def done(name: str) -> Any:
        def note(_result: list[Appended]) -> None:
            seen.append((name, threading.current_thread()))
            if name == "d":
                all_done.set()

        return note

    flushes: list[tuple[list[Any], list[int]]] = [
        ([(done("a"), []), (done("b"), [])], []),
        ([(done("c"), [])], []),
        ([(done("d"), [])], []),
    ]
    _on_a_thread(completions, flushes)
    assert seen == []
    await asyncio.wait_for(all_done.wait(), 30)
    assert seen == [(name, threading.current_thread()) for name in "abcd"]


async def test_watchers_are_called_after_the_completions_and_for_their_log_only(completions: Completions) -> None:
    seen: list[str] = []
    woken = asyncio.Event()

    def note() -> None:
        seen.append("watcher of 7")
        woken.set()

    unwatch = completions.watch(7, note)
    completions.watch(8, lambda: seen.append("watcher of 8"))
    _on_a_thread(completions, [([(lambda _: seen.append("completion"), [])], [7])])
    await asyncio.wait_for(woken.wait(), 30)
    assert seen == ["completion", "watcher of 7"]
    unwatch()
    completions.wake(7)
    completions.forget(8)
    completions.wake(8)
    assert seen == ["completion", "watcher of 7"]


async def test_a_defect_in_one_flush_is_reported_and_does_not_hold_back_the_next(completions: Completions) -> None:
    reported: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reported.append(context))
    done = asyncio.Event()

    def broken(_result: object) -> None:
        raise ValueError("a defect")

    _on_a_thread(completions, [([(broken, [])], []), ([(lambda _: done.set(), [])], [])])
    await asyncio.wait_for(done.wait(), 30)
    assert [str(context["exception"]) for context in reported] == ["a defect"]


async def test_closing_calls_the_completions_that_are_left() -> None:
    completions = Completions(asyncio.get_running_loop())
    seen: list[str] = []
    completions.deliver([(lambda _: seen.append("last"), [])], [])
    completions.close()
    assert seen == ["last"]
