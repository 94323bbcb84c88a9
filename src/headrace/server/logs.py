"""Log lines on stderr: one line per event, as text or JSON, through the standard library's logging.

A line never contains a payload. Control characters in text from a peer (a topic name, an address) are escaped, so that it cannot
control a terminal or forge a second line. Fields given as `extra={"peer": …}` appear as `peer=…` or as JSON keys.

The message of a line is constant, and its words joined by underscores are the name of the event: `connection_closed`. JSON lines have it
as `event`. docs/operations.md lists the names, and a test compares the list with the source, so they do not change by accident. At most
`LINES_PER_MINUTE_MAX` lines of one event are written in a minute; the next one tells how many were left out.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Final, TextIO

from headrace.net.counters import LineLimit
from headrace.server.config import Logging
from headrace.server.settings import LogFormat

_WORDS: Final = re.compile(r"[a-z0-9]+")
_OWN_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName", "event"}
_FIELD_CHARACTERS_MAX: Final = 500
_LIBRARIES: Final = ("asyncio", "quic")
"""Loggers of libraries whose warnings are written. Each is one event, because a peer can cause many different messages."""
LINES_PER_MINUTE_MAX: Final = 120


def set_up_logs(log: Logging, stream: TextIO | None = None) -> None:
    """Send the loggers `headrace` and `_LIBRARIES` to `stream` (default: stderr) in the configured format."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if log.format is LogFormat.JSON else TextLines())
    handler.addFilter(RateLimit())
    for name in ("headrace", *_LIBRARIES):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("headrace").setLevel(log.level.upper())
    for name in _LIBRARIES:
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a full disk or a closed pipe must not cause more output


def event_name(record: logging.LogRecord) -> str:
    """Return the stable name of the event: the words of its message without arguments, the field `event`, or the name of a library."""
    given = record.name if record.name in _LIBRARIES else getattr(record, "event", None)
    return str(given) if given is not None else slug(str(record.msg))


def slug(message: str) -> str:
    """Return the words of a message before its first argument or colon, joined by underscores."""
    return "_".join(_WORDS.findall(message.partition("%")[0].partition(":")[0].lower()))


class RateLimit(logging.Filter):
    """Leaves out lines of an event beyond `LINES_PER_MINUTE_MAX`, except debug lines."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        super().__init__()
        self._clock, self._limit, self._lock = clock, LineLimit(LINES_PER_MINUTE_MAX), threading.Lock()

    def filter(self, record: logging.LogRecord) -> bool:
        if record.levelno <= logging.DEBUG:
            return True
        with self._lock:
            left_out = self._limit.left_out((record.name, event_name(record)), self._clock())
        if left_out:
            record.left_out = left_out + getattr(record, "left_out", 0)
        return left_out is not None


def escaped(text: str) -> str:
    """Return the text on one line with unprintable characters escaped."""
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _time(record: logging.LogRecord) -> str:
    return datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _fields(record: logging.LogRecord) -> dict[str, object]:
    return {name: value for name, value in vars(record).items() if name not in _OWN_ATTRIBUTES}


def _shortened(text: str) -> str:
    return text if len(text) <= _FIELD_CHARACTERS_MAX else text[:_FIELD_CHARACTERS_MAX] + "…"


class TextLines(logging.Formatter):
    """`2026-11-15T07:49:01.123Z info    net.listener  connection closed  peer=127.0.0.1:5123 reason="idle"`"""

    def format(self, record: logging.LogRecord) -> str:
        place = record.name.removeprefix("headrace.")
        fields = "".join(f" {name}={self._value(value)}" for name, value in _fields(record).items())
        line = f"{_time(record)} {record.levelname.lower():<7} {place}  {escaped(record.getMessage())}{' ' * bool(fields)}{fields}"
        if record.exc_info and record.exc_info[1] is not None:
            line += f"  {self._failure(record.exc_info[1])}"
        return line

    @staticmethod
    def _value(value: object) -> str:
        if isinstance(value, (int, float)):
            return str(value)
        text = _shortened(str(value))
        plain = text.isprintable() and not any(char in ' "=' for char in text) and text != ""
        return text if plain else json.dumps(text)

    @staticmethod
    def _failure(failure: BaseException) -> str:
        """Return the exception and its last frame on one line; HEADRACE_TRACEBACK=1 adds the whole stack."""
        frames = traceback.extract_tb(failure.__traceback__)
        place = f" at {frames[-1].filename.rpartition('/headrace/')[2]}:{frames[-1].lineno}" if frames else ""
        line = f"{type(failure).__name__}: {escaped(str(failure))}{place}"
        if os.environ.get("HEADRACE_TRACEBACK") == "1":
            line += "\n" + "".join(traceback.format_exception(failure)).rstrip()
        return line


class JsonLines(logging.Formatter):
    """One JSON object per line, with the traceback of an exception as a string."""

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, object] = {
            "time": _time(record),
            "level": record.levelname.lower(),
            "logger": record.name,
            "event": event_name(record),
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value if isinstance(value, (int, float, bool)) else _shortened(str(value)))
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line)
