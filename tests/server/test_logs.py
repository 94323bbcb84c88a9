"""Log lines: one per event, escaped, as text or JSON."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest

from headrace.server.config import Logging
from headrace.server.logs import set_up_logs
from headrace.server.settings import LogFormat, LogLevel


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    loggers = [logging.getLogger("headrace"), logging.getLogger("asyncio")]
    before = [(logger, logger.handlers[:], logger.level, logger.propagate) for logger in loggers]
    yield
    for logger, handlers, level, propagate in before:
        logger.handlers[:], logger.propagate = handlers, propagate
        logger.setLevel(level)


def lines(log: Logging, message: str, *, level: int = logging.INFO, failure: BaseException | None = None, **fields: object) -> list[str]:
    stream = io.StringIO()
    set_up_logs(log, stream)
    logging.getLogger("headrace.net.listener").log(level, message, extra=fields, exc_info=failure)
    return stream.getvalue().splitlines()


TEXT, JSON = Logging(), Logging(format=LogFormat.JSON)


def test_a_text_line_tells_time_level_place_message_and_fields() -> None:
    [line] = lines(TEXT, "connection closed", peer="127.0.0.1:5123", reason="it was idle", frames=3)
    time, rest = line.split(" ", 1)
    assert time.endswith("Z") and len(time) == len("2026-11-15T07:49:01.123Z")
    assert rest == 'info    net.listener  connection closed  peer=127.0.0.1:5123 reason="it was idle" frames=3'


def test_a_json_line_is_one_object() -> None:
    [line] = lines(JSON, "connection closed", peer="127.0.0.1:5123", frames=3)
    event = json.loads(line)
    assert event.pop("time").endswith("Z")
    assert event == {
        "level": "info",
        "logger": "headrace.net.listener",
        "message": "connection closed",
        "peer": "127.0.0.1:5123",
        "frames": 3,
    }


@pytest.mark.parametrize("log", [TEXT, JSON], ids=["text", "json"])
@pytest.mark.parametrize("hostile", ["\x1b[2Jgone", "first\nsecond", "a\rb", "\u202eright", "\x9b31m", "\0"])
def test_what_a_peer_says_cannot_act_on_a_terminal_or_forge_a_line(log: Logging, hostile: str) -> None:
    [line] = lines(log, f"topic {hostile}", topic=hostile)
    assert line.isprintable()


def test_a_long_field_is_cut() -> None:
    [line] = lines(TEXT, "refused", topic="x" * 10_000)
    assert len(line) < 700


def test_lines_below_the_level_are_not_written() -> None:
    quiet = Logging(level=LogLevel.WARNING)
    assert lines(quiet, "small talk") == []
    assert len(lines(quiet, "trouble", level=logging.WARNING)) == 1


def failure() -> BaseException:
    try:
        raise ValueError("bad\nthing")
    except ValueError as caught:
        return caught


def test_an_exception_is_one_text_line_that_names_the_place() -> None:
    [line] = lines(TEXT, "flush failed", failure=failure())
    assert "ValueError: bad\\nthing at " in line
    assert "test_logs.py:" in line


def test_an_exception_brings_its_traceback_into_json() -> None:
    [line] = lines(JSON, "flush failed", failure=failure())
    assert json.loads(line)["traceback"].startswith("Traceback")


def test_the_whole_traceback_is_there_for_who_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_TRACEBACK", "1")
    assert any(line.startswith("Traceback") for line in lines(TEXT, "flush failed", failure=failure()))


def test_a_field_named_like_a_part_of_the_line_does_not_replace_it() -> None:
    [line] = lines(JSON, "hello", level_=1, logger="forged", time="forged")
    event = json.loads(line)
    assert event["logger"] == "headrace.net.listener"
    assert event["time"] != "forged"
