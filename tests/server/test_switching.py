"""The switch interval is shorter while the event loop serves large replies, and timed waits end on time."""

from __future__ import annotations

import ctypes
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest

from headrace.server.switching import switch_threads, wake_precisely

PR_GET_TIMERSLACK = 30


def test_threads_get_the_interpreter_sooner_while_the_loop_serves_large_replies() -> None:
    before = sys.getswitchinterval()
    try:
        switch_threads()
        usual = sys.getswitchinterval()
        switch_threads(True)
        assert 0 < sys.getswitchinterval() < usual < 0.005
        switch_threads(False)
        assert sys.getswitchinterval() == usual
    finally:
        sys.setswitchinterval(before)


def slack_nanoseconds() -> int:
    return int(ctypes.CDLL(None).prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0))


@pytest.mark.skipif(sys.platform != "linux", reason="a setting of Linux")
def test_timed_waits_of_a_thread_and_of_those_that_it_starts_end_on_time() -> None:
    def started() -> tuple[bool, int, int]:
        is_set = wake_precisely()
        with ThreadPoolExecutor(1) as threads:
            return is_set, slack_nanoseconds(), threads.submit(slack_nanoseconds).result()

    with ThreadPoolExecutor(1) as threads:  # the setting is the thread's
        assert threads.submit(started).result() == (True, 1, 1)
