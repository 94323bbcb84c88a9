"""The switch interval: how soon a thread gets the interpreter from another one that runs Python code.

A thread that wants the interpreter asks for it after the switch interval. If the other one gives it up and takes it again before that, as
an event loop does whose turns are shorter, the thread waits on. So beside a tenant that reads without a pause, the writer waits several
times in each flush: when it is woken, after the write and after the sync.
"""

from __future__ import annotations

import sys
from typing import Final

_SECONDS: Final = 0.0002
"""With Python's default of 5 ms, every turn of the event loop waits that long while the writer, the maintenance or a Flight thread runs
Python code, and the writer three times in a flush while the loop is busy. A publish at full speed takes 3 % more processor time with
0.1 ms, and 6 % more with 0.05 ms."""
_SECONDS_BUSY: Final = 0.00005
"""While the loop serves large replies, in slices of 0.1 to 0.6 ms. The median of a publish beside a Figg history was 1.9 ms with 0.2 ms,
1.3 ms with 0.1 ms and 1.2 ms with 0.05 ms; the p99 was 5.6, 2.9 and 2.3 ms."""


def switch_threads(is_busy: bool = False) -> None:
    """Set the switch interval. `is_busy`: the event loop serves large replies."""
    sys.setswitchinterval(_SECONDS_BUSY if is_busy else _SECONDS)
