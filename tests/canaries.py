"""Canaries: the secrets of the test suite, and a watch that fails the test in which one of them shows.

Passwords and keys that tests use are made by `secret` and `ENCRYPTION_KEY`. All of them carry a mark that stands in nothing else, so the
watch need not know them: wherever the mark turns up, as it is, in hexadecimal or in base64, a secret has leaked. It looks at

- everything a test prints and logs in its own process,
- every error of ours, as soon as it is made,
- the command line of every process that a test starts, and what that process writes, to a pipe or to a file,
- the ready file of every broker (`look`).

`tests/test_canaries.py` plants a leak of each kind and sees it caught.
"""

from __future__ import annotations

import asyncio.subprocess
import base64
import functools
import io
import logging
import os
import subprocess
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any, Final

import pytest

from headrace.errors import HeadraceError

_MARK: Final = "cnry7Qz0"
_KEY_MARK: Final = bytes.fromhex("ca9a21e5ec2e7f0d")
ENCRYPTION_KEY: Final = _KEY_MARK * 4
"""A key for data at rest."""


def secret(name: str) -> str:
    """A secret for tests: the same one for the same name."""
    return f"{_MARK}-{name}-{_MARK}"


def _in_base64(mark: bytes) -> Iterator[bytes]:
    """What of the mark is sure to stand in the base64 of a text around it: one for each place it may begin at."""
    for shift in range(3):
        encoded = base64.b64encode(bytes(shift) + mark + bytes(3))
        first = -(-shift * 8 // 6)
        yield encoded[first : (shift + len(mark)) * 8 // 6]


def _traces() -> Iterator[bytes]:
    for mark in (_MARK.encode(), _KEY_MARK):
        yield mark
        yield mark.hex().encode()
        for encoded in _in_base64(mark):
            yield encoded
            yield encoded.translate(bytes.maketrans(b"+/", b"-_"))
    yield repr(_KEY_MARK)[2:-1].encode()


TRACES: Final = tuple(dict.fromkeys(_traces()))
_OVERLAP_BYTES: Final = max(map(len, TRACES))
_leaks: list[str] = []
_logs: dict[Path, tuple[int, subprocess.Popen[Any]]] = {}
"""Files that a child writes to: how far they have been looked at, and who writes."""


def shows(content: bytes | str) -> bool:
    """Whether a secret is in there."""
    found = content.encode("utf-8", "surrogateescape") if isinstance(content, str) else bytes(content)
    return any(trace in found for trace in TRACES) or _KEY_MARK.hex().encode() in found.lower()


def look(content: bytes | str | None, where: str) -> None:
    """Note a leak if there is one; the test under way fails for it."""
    if content and shows(content):
        _leaks.append(where)


# Children.


def _watched_start(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def start(self: subprocess.Popen[Any], args: Any, *more: Any, **options: Any) -> None:
        original(self, args, *more, **options)
        words = [args] if isinstance(args, (str, bytes, os.PathLike)) else list(args)
        name = " ".join(os.fsdecode(word) for word in words)[:80]
        look(b"\0".join(os.fsencode(word) for word in words), f"the command line of: {name.partition(_MARK)[0]}")
        for stream in (options.get("stdout"), options.get("stderr")):
            if isinstance(stream, io.IOBase) and isinstance(path := getattr(stream, "name", None), str):
                _logs.setdefault(Path(path).absolute(), (0, self))

    return start


def _watched_end(original: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    @functools.wraps(original)
    def communicate(self: subprocess.Popen[Any], *args: Any, **options: Any) -> tuple[Any, Any]:
        told = original(self, *args, **options)
        for content, name in zip(told, ("stdout", "stderr"), strict=True):
            look(content, f"{name} of a process")
        return told

    return communicate


def _watched_pipe(original: Callable[..., None]) -> Callable[..., None]:
    @functools.wraps(original)
    def pipe_data_received(self: Any, fd: int, data: bytes) -> None:
        look(data, f"descriptor {fd} of a process")
        original(self, fd, data)

    return pipe_data_received


def _look_at_logs() -> None:
    for path, (seen, process) in list(_logs.items()):
        has_ended = process.poll() is not None
        try:
            with path.open("rb") as stream:
                stream.seek(max(0, seen - _OVERLAP_BYTES))
                look(stream.read(), f"the file {path.name} of a process")
                _logs[path] = (stream.tell(), process)
        except OSError:
            has_ended = True
        if has_ended:
            del _logs[path]


# This process.


class _Ear(logging.Handler):
    """Hears everything that is logged, with what rides on a line."""

    def emit(self, record: logging.LogRecord) -> None:
        look(f"{record.getMessage()} {record.__dict__!r} {record.exc_info!r}", f"a log line of {record.name}")


def _watched_error(self: HeadraceError, *args: object) -> None:
    Exception.__init__(self, *args)
    look(" ".join(map(str, args)), f"an error: {type(self).__name__}")


_EAR: Final = _Ear(logging.DEBUG)
_PATCHES: Final[tuple[tuple[Any, str, Callable[[Any], Any]], ...]] = (
    (subprocess.Popen, "__init__", _watched_start),
    (subprocess.Popen, "communicate", _watched_end),
    (asyncio.subprocess.SubprocessStreamProtocol, "pipe_data_received", _watched_pipe),
    (HeadraceError, "__init__", lambda original: _watched_error),
)
_undo: list[Callable[[], None]] = []


def pytest_configure(config: pytest.Config) -> None:
    for owner, name, watched in _PATCHES:
        original = getattr(owner, name)
        setattr(owner, name, watched(original))
        _undo.append(functools.partial(setattr, owner, name, original))
    logging.getLogger().addHandler(_EAR)


def pytest_unconfigure(config: pytest.Config) -> None:
    logging.getLogger().removeHandler(_EAR)
    while _undo:
        _undo.pop()()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item: pytest.Item) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    for name, content in report.sections:
        if name.endswith(report.when):  # a report repeats what earlier ones held
            look(content, name)
    _look_at_logs()
    if _leaks:
        report.outcome = "failed"
        report.longrepr = f"a secret shows in {', '.join(dict.fromkeys(_leaks))}"
        _leaks.clear()
    return report
