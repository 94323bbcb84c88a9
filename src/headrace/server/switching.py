"""Hand over the interpreter between threads in time: the switch interval, and the precision of timed waits.

A thread that wants the interpreter asks for it after the switch interval. If the other one gives it up and takes it again before that, as
an event loop does whose turns are shorter, the thread waits on. So beside a tenant that reads without a pause, the writer waits several
times in each flush: when it is woken, after the write and after the sync.

The kernel lets such a wait last up to 50 µs longer by default, as long as the interval itself.
"""

from __future__ import annotations

import ctypes
import sys
from typing import Final

_SECONDS: Final = 0.0002
"""With Python's default of 5 ms, every turn of the event loop waits that long while the writer, the maintenance or a Flight thread runs
Python code, and the writer three times in a flush while the loop is busy. A publish at full speed takes 3 % more processor time with
0.1 ms, and 6 % more with 0.05 ms."""
_SECONDS_BUSY: Final = 0.00003
"""While the loop serves large replies, in slices of 0.1 to 0.6 ms. The median of a publish beside a Figg history was 1.9 ms with 0.2 ms,
1.3 ms with 0.1 ms and 1.2 ms with 0.05 ms; the p99 was 5.6, 2.9 and 2.3 ms. With precise timers the median was 0.93 ms with
0.05 ms, and 0.86 ms with 0.03 or 0.02 ms. With 0.005 ms single publishes took 20 to 40 ms."""
_PR_SET_TIMERSLACK: Final = 29
_SLACK_NANOSECONDS: Final = 1


def switch_threads(is_busy: bool = False) -> None:
    """Set the switch interval. `is_busy`: the event loop serves large replies."""
    sys.setswitchinterval(_SECONDS_BUSY if is_busy else _SECONDS)


def wake_precisely() -> bool:
    """Let the timed waits of this thread, and of those that it starts, end on time. Return False where the kernel is not Linux's: they then
    end a little later."""
    try:
        prctl = ctypes.CDLL(None).prctl
    except (OSError, AttributeError):
        return False
    return bool(prctl(_PR_SET_TIMERSLACK, _SLACK_NANOSECONDS, 0, 0, 0) == 0)
