"""Parser of strace output. A call that was interrupted by one of another thread is joined again."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

_LINE = re.compile(r"^(?P<thread>\d+) +(?P<rest>.*)$")
_RESUMED = re.compile(r"^<\.\.\. \w+ resumed>(?P<rest>.*)$")
_CALL = re.compile(r"^(?P<name>\w+)\((?P<arguments>.*?)\) += (?P<result>-?\d+)", re.DOTALL)
_UNFINISHED = " <unfinished ...>"


@dataclass(frozen=True, slots=True)
class Call:
    """One system call, with the lines on which it began and ended."""

    began: int
    ended: int
    name: str
    arguments: str
    result: int


def read_trace(path: Path) -> list[Call]:
    """Return all completed calls in the order of completion."""
    calls: list[Call] = []
    unfinished: dict[str, tuple[int, str]] = {}
    for number, line in enumerate(path.read_text(errors="replace").splitlines()):
        found = _LINE.match(line)
        if found is None:
            continue
        thread, rest, began = found["thread"], found["rest"], number
        if rest.endswith(_UNFINISHED):
            unfinished[thread] = (number, rest.removesuffix(_UNFINISHED))
            continue
        resumed = _RESUMED.match(rest)
        if resumed is not None:
            began, front = unfinished.pop(thread)
            rest = front + resumed["rest"]
        call = _CALL.match(rest)
        if call is not None:
            calls.append(Call(began, number, call["name"], call["arguments"], int(call["result"])))
    return calls


def escaped(content: bytes) -> str:
    """Return bytes in the notation of `strace -xx`."""
    return "".join(f"\\x{byte:02x}" for byte in content)
