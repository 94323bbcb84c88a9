"""Wake-ups of the writer."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.storage.wakeup import Wakeup
from tests.storage.stores import until

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


class Waiting:
    """A thread that waits in the kernel until it is woken."""

    def __init__(self, wakeup: Wakeup) -> None:
        self._wakeup = wakeup
        self._woken = threading.Event()
        self.thread = threading.Thread(target=self._work, daemon=True)
        self.thread.start()
        until(self.waits)

    def _work(self) -> None:
        self._wakeup.wait()
        self._woken.set()

    def waits(self) -> bool:
        """Return whether it is in a system call on the descriptor."""
        call = Path(f"/proc/self/task/{self.thread.native_id}/syscall").read_text("ascii").split()
        return call[1:2] == [hex(self._wakeup._event)]

    def check_woken(self) -> None:
        assert not self._woken.is_set()
        self._wakeup.wake()
        assert self._woken.wait(SECONDS_MAX)
        self.thread.join()


def test_a_waiting_thread_is_woken(wakeup: Wakeup) -> None:
    Waiting(wakeup).check_woken()


def test_a_forgotten_wake_up_does_not_end_the_next_wait(wakeup: Wakeup) -> None:
    wakeup.wake()
    wakeup.forget()
    Waiting(wakeup).check_woken()


def test_a_signal_does_not_end_the_thread_that_waits(wakeup: Wakeup) -> None:
    heard = threading.Event()
    before = signal.signal(signal.SIGUSR1, lambda number, frame: heard.set())
    try:
        waiting = Waiting(wakeup)
        assert waiting.thread.ident is not None
        signal.pthread_kill(waiting.thread.ident, signal.SIGUSR1)
        until(heard.is_set)
        until(waiting.waits)
        waiting.check_woken()
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
