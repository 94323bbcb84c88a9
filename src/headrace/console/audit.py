"""Audit trail of the console: every action with its user, address, equivalent command and result.

The broker's own audit log has changes and denials of all clients; this one adds publications and replays, and the address of the browser.
"""

from __future__ import annotations

import json
import logging
from collections import deque
from pathlib import Path
from typing import Final, NamedTuple

_log: Final = logging.getLogger(__name__)
_ENTRIES_MAX: Final = 1_000


class Entry(NamedTuple):
    """One action."""

    time_ms: int
    user: str
    address: str
    action: str
    command: str
    result: str


class Trail:
    """The last actions in memory, and all of them in a file if there is one."""

    def __init__(self, file: Path | None = None) -> None:
        self.entries: deque[Entry] = deque(maxlen=_ENTRIES_MAX)
        self._stream = None if file is None else file.open("a", encoding="utf-8")

    def note(self, entry: Entry) -> None:
        self.entries.appendleft(entry)
        _log.info("%s", entry.action, extra={"user": entry.user, "address": entry.address, "result": entry.result})
        if self._stream is not None:
            self._stream.write(json.dumps(entry._asdict(), ensure_ascii=True) + "\n")
            self._stream.flush()

    def close(self) -> None:
        if self._stream is not None:
            self._stream.close()
