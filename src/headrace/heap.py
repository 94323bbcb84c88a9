"""Settings of the C library's heap for pages and record batches of up to a few megabytes."""

from __future__ import annotations

import ctypes
from typing import Final

from headrace.limits import MIB

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
_KEPT_BYTES: Final = 64 * MIB
"""Unused bytes kept at the end of the heap."""
_HEAP_BYTES_MAX: Final = 8 * MIB
"""Larger chunks get their own mapping: single records of that size are rare."""


def keep_large_chunks() -> bool:
    """Configure the C library to keep memory of the size of batches, in one heap. Return False if it is not glibc, which is harmless.

    Every chunk that Flight reads or receives has a few megabytes and lives for milliseconds. By default the C library returns such chunks
    to the kernel immediately, and the kernel clears each page again: 0.139 µs per row with the defaults, 0.089 with these settings. While
    a FlyMQ client fetched pages of half a megabyte, page faults and `brk` took 30 % of the event loop's time.

    A heap per thread would keep the chunks that this thread has freed, and no other thread would use them: while 400 MB at a time were
    staged and published, with stages of up to 256 MiB, the process had 806 MiB with several heaps and 504 MiB with one. Heaps that exist
    stay in use, so this is called before threads start.

    Spark's workers receive the batches of a read: 24,000 page faults per 4 million rows of 100 bytes with the defaults, 2 with these
    settings.
    """
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (OSError, AttributeError):
        return False
    settings = ((_M_MMAP_THRESHOLD, _HEAP_BYTES_MAX), (_M_TRIM_THRESHOLD, _KEPT_BYTES), (_M_ARENA_MAX, 1))
    return all([mallopt(*setting) for setting in settings])
