"""Log lines: one per event, escaped, as text or JSON."""

from __future__ import annotations

import ast
import io
import json
import logging
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.server.config import Logging
from headrace.server.logs import LINES_PER_MINUTE_MAX, RateLimit, set_up_logs, slug
from headrace.server.settings import LogFormat, LogLevel


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    loggers = [logging.getLogger(name) for name in ("headrace", "asyncio", "quic")]
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
        "event": "connection_closed",
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


# Events

SOURCE = Path(__file__).parent.parent.parent / "src" / "headrace"
MANUAL = SOURCE.parent.parent / "docs" / "operations.md"
OF_THE_BROKER = ("access", "broker", "engine", "flight", "net", "server", "sessions", "storage")


def events() -> Iterator[tuple[str, str]]:
    """Yield (place, name) of every event that the broker logs."""
    for path in sorted(path for package in OF_THE_BROKER for path in (SOURCE / package).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and isinstance(node.func.value, ast.Name)):
                continue
            if node.func.value.id not in ("_log", "log") or node.func.attr not in ("debug", "info", "warning", "error", "log"):
                continue
            message = node.args[1 if node.func.attr == "log" else 0]
            for text in (message.body, message.orelse) if isinstance(message, ast.IfExp) else (message,):
                is_constant = isinstance(text, ast.Constant) and isinstance(text.value, str)
                assert is_constant, f"{path.name}:{node.lineno}: the message of a log line is constant; use fields"
                yield f"{path.name}:{node.lineno}", slug(ast.literal_eval(text))


def test_every_event_is_in_the_manual() -> None:
    """The names are an interface: alerts on logs use them."""
    listed = re.findall(r"^\| `([a-z0-9_]+)` \|", MANUAL.read_text("utf-8").partition("## Logs")[2].partition("\n## ")[0], re.MULTILINE)
    assert sorted(listed) == sorted({name for _, name in events()})


def test_the_name_of_an_event_does_not_depend_on_its_arguments() -> None:
    stream = io.StringIO()
    set_up_logs(JSON, stream)
    logging.getLogger("headrace.x").warning("disk of %s is slow: %d ms", "ann", 3)
    logging.getLogger("headrace.x").warning("anything", extra={"event": "chosen"})
    found = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [line["event"] for line in found] == ["disk_of", "chosen"]


def test_a_flood_of_one_event_is_cut_and_the_rest_is_counted() -> None:
    now = [0.0]
    limit = RateLimit(lambda: now[0])

    def passes(message: str, level: int = logging.WARNING) -> logging.LogRecord | None:
        record = logging.makeLogRecord({"name": "headrace.net", "msg": message, "levelno": level})
        return record if limit.filter(record) else None

    assert sum(passes("audit event lost") is not None for _ in range(LINES_PER_MINUTE_MAX + 50)) == LINES_PER_MINUTE_MAX
    assert passes("connection closed") is not None, "other events are not affected"
    assert all(passes("audit event lost", logging.DEBUG) is not None for _ in range(10)), "debug lines are wanted in full"
    now[0] = 61.0
    next_line = passes("audit event lost")
    assert next_line is not None and vars(next_line)["left_out"] == 50


def test_warnings_of_the_quic_library_are_lines_of_one_event_and_limited() -> None:
    stream = io.StringIO()
    set_up_logs(JSON, stream)
    for number in range(LINES_PER_MINUTE_MAX + 30):
        logging.getLogger("quic").warning(f"[{number:016x}] Error: {number}, reason: \x1b[31m\n")
    logging.getLogger("quic").info("connected")
    written = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(written) == LINES_PER_MINUTE_MAX and {line["event"] for line in written} == {"quic"}
