"""Settings of the C library's heap."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Final

HEAPS: Final = """
import ctypes, sys, threading
from headrace.heap import keep_large_chunks
assert keep_large_chunks()
barrier = threading.Barrier(4)
def allocate():
    kept = [ctypes.create_string_buffer(100_000 + each) for each in range(10)]
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads: thread.start()
for thread in threads: thread.join()
sys.stdout.flush()
ctypes.CDLL(None).malloc_stats()
"""


def test_threads_share_one_heap() -> None:
    plain = {name: value for name, value in os.environ.items() if not name.startswith("MALLOC_")}
    done = subprocess.run([sys.executable, "-c", HEAPS], env=plain, capture_output=True, text=True, timeout=300, check=True)
    assert done.stderr.count("Arena ") == 1
