"""Verify the order of writes and syncs in a trace: a manifest never covers unsynced bytes.

The manifest records how much of each segment is durable, and journal files are recycled based on it. So when a new manifest is
renamed into place, every segment must have been synced since its last write.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Final

from tests.crash.trace import Call

_DESCRIPTOR: Final = re.compile(r"^\d+<(?P<path>[^>]*)>")
_QUOTED: Final = re.compile(r'"(?P<path>[^"]*)"')


class UnsyncedSegment(AssertionError):
    """A manifest was renamed into place while a segment had unsynced bytes."""


def check_sync_order(calls: Sequence[Call]) -> int:
    """Raise `UnsyncedSegment` on the first violation. Returns the number of manifests checked.

    The trace has to show paths, both of descriptors (`strace -y`) and of names (no `-s 0` for them: strace never truncates paths).
    """
    unsynced: dict[str, Call] = {}
    manifests = 0
    for call in calls:
        if call.result < 0:
            continue  # a failed call changes nothing, and a failed sync covers nothing
        if call.name in ("pwritev2", "fdatasync", "fsync"):
            found = _DESCRIPTOR.match(call.arguments)
            path = found["path"] if found else ""
            if call.name == "pwritev2" and path.endswith((".seg", ".tmp")):
                unsynced[path] = call
            elif call.name != "pwritev2":
                unsynced.pop(path, None)
        elif call.name == "unlink":
            for path in _QUOTED.findall(call.arguments):
                unsynced.pop(path, None)
        elif call.name == "rename":
            source, target = _QUOTED.findall(call.arguments)[:2]
            if source in unsynced:
                raise UnsyncedSegment(
                    f"line {call.began}: {source} takes the name {target} before a sync covers line {unsynced[source].began}"
                )
            if target.endswith("/MANIFEST"):
                manifests += 1
                for path, write in unsynced.items():
                    raise UnsyncedSegment(
                        f"line {call.began}: a manifest is published, and {path}, written on line {write.began}, is not synced"
                    )
    return manifests
