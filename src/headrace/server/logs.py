"""Log lines on stderr: one line per event, as text or JSON, through the standard library's logging.

A line never contains a payload. Control characters in text from a peer (a topic name, an address) are escaped, so that it cannot
control a terminal or forge a second line. Fields given as `extra={"peer": …}` appear as `peer=…` or as JSON keys.
"""

from __future__ import annotations

import json
import logging
import os
import sys
import traceback
from datetime import UTC, datetime
from typing import Final, TextIO

from headrace.server.config import Logging
from headrace.server.settings import LogFormat

_OWN_ATTRIBUTES: Final = frozenset(vars(logging.makeLogRecord({}))) | {"message", "asctime", "taskName"}
_FIELD_CHARACTERS_MAX: Final = 500


def set_up_logs(log: Logging, stream: TextIO | None = None) -> None:
    """Send the loggers `headrace` and `asyncio` to `stream` (default: stderr) in the configured format."""
    handler = logging.StreamHandler(sys.stderr if stream is None else stream)
    handler.setFormatter(JsonLines() if log.format is LogFormat.JSON else TextLines())
    for name in ("headrace", "asyncio"):
        logger = logging.getLogger(name)
        logger.handlers[:] = [handler]
        logger.propagate = False
    logging.getLogger("headrace").setLevel(log.level.upper())
    logging.getLogger("asyncio").setLevel(logging.WARNING)
    logging.raiseExceptions = False  # a full disk or a closed pipe must not cause more output


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
            "message": record.getMessage(),
        }
        for name, value in _fields(record).items():
            line.setdefault(name, value if isinstance(value, (int, float, bool)) else _shortened(str(value)))
        if record.exc_info and record.exc_info[1] is not None:
            line["traceback"] = "".join(traceback.format_exception(record.exc_info[1]))
        return json.dumps(line)
