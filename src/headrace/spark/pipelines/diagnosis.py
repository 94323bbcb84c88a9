"""What a failure of Spark comes down to: one line, the kind of failure, and whether trying again may help.

Spark wraps the error of a task in Java, and that in Python again; the line that helps is in the middle: the last line of the Python
traceback, or the message of an analysis with its place in the SQL text.
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
    """A failure in one line. `kind` is the code of an error of the broker, empty if it was something else."""

    text: str
    kind: str = ""
    retriable: bool = True
    is_engine_lost: bool = False

    @property
    def likeness(self) -> str:
        """Equal for failures that are the same but for numbers of tasks, addresses and ids."""
        return _ADDRESS.sub("#", self.text)


def diagnose(failure: BaseException) -> Diagnosis:
    """Of whatever Spark, py4j or a step raised."""
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
    """The line, with the place in the SQL text where Spark names one."""
    found = diagnose(failure).text
    position = _POSITION.search(str(failure))
    return found if position is None or _POSITION.search(found) else f"{found} (line {position[1]}, pos {position[2]})"


def is_engine_lost(failure: BaseException) -> bool:
    """A call that Java did not answer, as opposed to one that it answered with an exception: that may tell of any broken connection."""
    return isinstance(failure, (Py4JError, ConnectionError)) and not isinstance(failure, Py4JJavaError)


def diagnose_text(text: str) -> Diagnosis:
    """Of a message of Spark with everything it carries along."""
    body = _END.split(text, maxsplit=1)[0].strip()
    if "Traceback (most recent call last)" in body:
        raised = _last_raised(body)
        if raised is not None:
            return raised
    first = next((line for line in body.splitlines() if line.strip()), "")
    return Diagnosis(_clean(first))


def offsets_of(text: str) -> tuple[str, str]:
    """What a failed query had committed and what it was about to read, as Spark tells it; empty if it does not."""
    found = dict(_OFFSETS.findall(text))
    return found.get("Committed", ""), found.get("Available", "")


def _last_raised(body: str) -> Diagnosis | None:
    """The last line of the last traceback; what follows it in the same message belongs to it."""
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
