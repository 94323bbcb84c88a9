"""Headers of batches as objects of the interpreter: in an installation with compiled modules they are objects of C."""

from __future__ import annotations

import subprocess
import sys

SCRIPT = """
from headrace.storage.batch import BatchHeader

for depth in range(10, 120):
    nested = BatchHeader(0, 0, 0, 0, 0, 0, 0, 0, 0, 0, b"")
    for _ in range(depth):
        nested = (nested,)
    del nested
"""


def test_a_header_in_deeply_nested_objects_is_freed_without_touching_other_memory() -> None:
    """The interpreter frees deeply nested objects later, and links them through a field in front of the object that only objects under
    garbage collection have. mypyc's `acyclic` leaves it out. The allocator for debugging aborts if that field is not there."""
    command = [sys.executable, "-X", "dev", "-c", SCRIPT]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
