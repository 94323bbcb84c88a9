"""Diagnosis of Spark failures: one line, the kind of failure, and whether a retry may help.

Spark wraps the error of a task in a Java exception, and that in a Python exception. The useful line is in the middle: the last line of the
Python traceback, or the analysis message with its position in the SQL text.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Final

from py4j.protocol import Py4JError, Py4JJavaError

from headrace import errors
from headrace.errors import HeadraceError

_END: Final = re.compile(r"\n=== Streaming Query ===|\nJVM stacktrace:|\n\tat |\n== SQL|\n\n?'?[A-Z]\w+[ (\[].*\n[:+ ]")
_RAISED: Final = re.compile(r"^(?P<name>[A-Za-z_][\w.]*(?:Error|Exception|Exit|Interrupt|[A-Z]\w+)): ?(?P<text>.*)$", re.MULTILINE)
_CONDITION: Final = re.compile(r"\[[A-Z][A-Z0-9_]+(?:\.[A-Z0-9_]+)*\] ?")
_STATE: Final = re.compile(r"\.?\s+SQLSTATE: \w{5}")
_OFFSETS: Final = re.compile(r"Current (Committed|Available) Offsets: (\{.*\})$", re.MULTILINE)
_ADDRESS: Final = re.compile(r"0x[0-9a-f]+|\b[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]+\b|@[0-9a-f]{6,}|#\d+L?|in stage [\d.]+|TID \d+|task [\d.]+")
_POSITION: Final = re.compile(r"line (\d+),? pos (\d+)")
_LINE_CHARACTERS_MAX: Final = 500


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """A failure in one line. `kind` is the code of a broker error, empty for other failures."""

    text: str
    kind: str = ""
    retriable: bool = True
    is_engine_lost: bool = False

    @property
    def signature(self) -> str:
        """The text without task numbers, addresses and ids, to recognise repeated failures."""
        return _ADDRESS.sub("#", self.text)


def diagnose(failure: BaseException) -> Diagnosis:
    """Diagnose an exception from Spark, py4j or a step."""
    if isinstance(failure, HeadraceError):
        code = getattr(failure, "code", "")
        return Diagnosis(str(failure), code, bool(getattr(failure, "retriable", False)))
    name = type(failure).__name__
    text = str(failure).strip()
    if is_engine_lost(failure):
        return Diagnosis("the Spark process has ended", is_engine_lost=True, retriable=False)
    found = diagnose_text(text)
    if not found.text:
        return Diagnosis(name)
    return found


def explained(failure: BaseException) -> str:
    """Return the line, with the position in the SQL text if Spark names one."""
    found = diagnose(failure).text
    position = _POSITION.search(str(failure))
    return found if position is None or _POSITION.search(found) else f"{found} (line {position[1]}, pos {position[2]})"


def is_engine_lost(failure: BaseException) -> bool:
    """Return whether the Java process did not answer. An exception from Java is an answer, even if it reports a broken connection."""
    return isinstance(failure, (Py4JError, ConnectionError)) and not isinstance(failure, Py4JJavaError)


def diagnose_text(text: str) -> Diagnosis:
    """Diagnose a message of Spark with its stack traces and plans."""
    body = _END.split(text, maxsplit=1)[0].strip()
    if "Traceback (most recent call last)" in body:
        raised = _last_raised(body)
        if raised is not None:
            return raised
    first = next((line for line in body.splitlines() if line.strip()), "")
    return Diagnosis(_clean(first))


def offsets_of(text: str) -> tuple[str, str]:
    """Return the committed and the available offsets from a message of Spark; empty if it has none."""
    found = dict(_OFFSETS.findall(text))
    return found.get("Committed", ""), found.get("Available", "")


def _last_raised(body: str) -> Diagnosis | None:
    """Return the last line of the last traceback."""
    _, _, tail = body.rpartition("Traceback (most recent call last)")
    matches = [match for match in _RAISED.finditer(tail) if not match[0].startswith(" ")]
    if not matches:
        return None
    name, text = matches[-1]["name"], _clean(matches[-1]["text"])
    short = name.rpartition(".")[2]
    known = getattr(errors, short, None)
    if isinstance(known, type) and issubclass(known, HeadraceError):
        return Diagnosis(text, getattr(known, "code", ""), bool(getattr(known, "retriable", False)))
    return Diagnosis(f"{short}: {text}" if text else short)


def _clean(line: str) -> str:
    line = _STATE.sub("", _CONDITION.sub("", line)).strip().rstrip(";").strip()
    return line if len(line) <= _LINE_CHARACTERS_MAX else line[: _LINE_CHARACTERS_MAX - 1] + "…"
