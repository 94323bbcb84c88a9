"""Wake-ups of the writer."""

from __future__ import annotations

import signal
import threading
import time
from collections.abc import Iterator

import pytest

from headrace.storage.wakeup import Wakeup

SECONDS_MAX = 30


@pytest.fixture
def wakeup() -> Iterator[Wakeup]:
    made = Wakeup()
    yield made
    made.close()


def test_a_wake_up_before_the_wait_ends_it(wakeup: Wakeup) -> None:
    wakeup.wake()
    wakeup.wake()
    wakeup.wait()


def test_a_waiting_thread_is_woken(wakeup: Wakeup) -> None:
    woken = threading.Event()

    def work() -> None:
        wakeup.wait()
        woken.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert not woken.wait(0.05)
    wakeup.wake()
    assert woken.wait(SECONDS_MAX)
    thread.join()


def test_a_forgotten_wake_up_does_not_end_the_next_wait(wakeup: Wakeup) -> None:
    wakeup.wake()
    wakeup.forget()
    woken = threading.Event()

    def work() -> None:
        wakeup.wait()
        woken.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    assert not woken.wait(0.05)
    wakeup.wake()
    assert woken.wait(SECONDS_MAX)
    thread.join()


def test_a_signal_does_not_end_the_thread_that_waits(wakeup: Wakeup) -> None:
    woken = threading.Event()

    def work() -> None:
        wakeup.wait()
        woken.set()

    before = signal.signal(signal.SIGUSR1, lambda number, frame: None)
    try:
        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        time.sleep(0.05)
        assert thread.ident is not None
        signal.pthread_kill(thread.ident, signal.SIGUSR1)
        assert not woken.wait(0.05)
        wakeup.wake()
        assert woken.wait(SECONDS_MAX)
        thread.join()
    finally:
        signal.signal(signal.SIGUSR1, before)


def test_no_work_is_left_behind_whenever_it_arrives(wakeup: Wakeup) -> None:
    """The worker takes everything before it waits, as the writer does. Each piece of work is announced after it is there."""
    waiting: list[int] = []
    taken: list[int] = []
    count = 20_000
    all_taken = threading.Event()

    def work() -> None:
        while len(taken) < count:
            wakeup.wait()
            wakeup.forget()
            while waiting:
                taken.append(waiting.pop(0))
                wakeup.forget()
        all_taken.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    for number in range(count):
        waiting.append(number)
        wakeup.wake()
        if number % 7 == 0:
            threading.Event().wait(0)  # lets the worker go on
    assert all_taken.wait(SECONDS_MAX)
    assert taken == list(range(count))
    thread.join()
