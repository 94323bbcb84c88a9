"""`headrace sub` and `fetch` through FlyMQ, their default: all partitions, patterns, positions and formats."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from itertools import count

import pytest

from headrace.cli import NOT_FOUND
from headrace.cli.printed import PrintedRecord, exact
from headrace.cli.template import Template
from headrace.records import RecordBatch
from tests.cli.shell import Ended, Shell, shell_of_a_broker
from tests.sessions.flymq.support import DEV, NOW

NAMES = count()


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with shell_of_a_broker() as shell:
        yield shell


@pytest.fixture
def topic() -> str:
    return f"{next(NAMES)}-read"


def publish(shell: Shell, topic: str, value: bytes, partition: int = 0, **more: object) -> None:
    async def append() -> None:
        await shell.broker.publish(DEV, topic, RecordBatch([value], **more), partition=partition)  # type: ignore[arg-type]  # columns

    shell.do(append())


def spread(shell: Shell, topic: str, count: int = 9) -> None:
    """Publish 0, 1, … to three partitions in turn, a second apart."""
    shell.create(topic, partitions=3)
    for number in range(count):
        shell.at(NOW + number * 1000)
        publish(shell, topic, b"%d" % number, number % 3)


def test_fetch_needs_no_protocol_and_reads_all_partitions_by_time(shell: Shell, topic: str) -> None:
    spread(shell, topic)
    assert shell("fetch", topic).out == b"0\n1\n2\n3\n4\n5\n6\n7\n8\n"
    assert shell("fetch", topic, "-n", "4").out == b"0\n1\n2\n3\n"
    assert shell("fetch", topic, "--partition", "1").out == b"1\n4\n7\n"


def test_sub_counts_over_all_partitions(shell: Shell, topic: str) -> None:
    spread(shell, topic)
    assert sorted(shell("sub", topic, "--from", "earliest", "-n", "9").out.split()) == [b"%d" % number for number in range(9)]
    assert len(shell("sub", topic, "--from", "earliest", "-n", "4").out.split()) == 4


@pytest.mark.parametrize("command", [["fetch"], ["sub", "-n", "4"]], ids=["fetch", "sub"])
def test_the_last_records_are_those_of_all_partitions_together(shell: Shell, topic: str, command: list[str]) -> None:
    spread(shell, topic)
    publish(shell, topic, b"9", 2)
    assert sorted(shell(*command, topic, "--from", "-4").out.split()) == [b"6", b"7", b"8", b"9"]


def test_more_than_there_are_is_everything(shell: Shell, topic: str) -> None:
    spread(shell, topic, 2)
    assert shell("fetch", topic, "--from", "-100").out == b"0\n1\n"
    assert shell("fetch", topic, "--from", "-1", "--group", "g").code == 2
    assert "does not support --from -1" in shell("fetch", topic, "--from", "-1", "--protocol", "rustlog").err


def test_a_template_prints_every_field(shell: Shell, topic: str) -> None:
    shell.at(NOW)
    shell.create(topic)
    publish(shell, topic, b"value", keys=[b"key"], headers=[(("a", b"1"), ("b", b"2"))])
    publish(shell, topic, None, keys=[b"key"])  # type: ignore[arg-type]  # a tombstone
    done = shell("fetch", topic, "--format", r"%t %p %o %k %s %h %T %K %S%%\n")
    assert done.out.decode().splitlines() == [f"{topic} 0 0 key value a=1,b=2 {NOW} 3 5%", f"{topic} 0 1 key   {NOW} 3 -1%"]
    assert shell("sub", topic, "--from", "0", "-n", "1", "--format", r"%s\t").out == b"value\t"
    wrong = shell("fetch", topic, "--format", "%x")
    assert (wrong.code, "%x is unknown; known are %t, %p" in wrong.err) == (2, True)


def test_a_template_of_another_protocol_prints_what_it_has() -> None:
    record = PrintedRecord("t", None, None, b"\xff")
    assert Template(r"%p|%o|%T|%h|%k|%s|\x41\\").render(record) == b"-1|-1|-1|||\xff|A\\"


def test_json_has_timestamp_and_headers_and_can_be_published_again(shell: Shell, topic: str) -> None:
    shell.at(NOW)
    shell.create(topic)
    publish(shell, topic, b'{"id": 1}', keys=[b"k"], headers=[(("trace", b"x"), ("trace", b"\xff"))])
    publish(shell, topic, b"\xff")
    publish(shell, topic, b'"quoted"')
    publish(shell, topic, b"1.10")
    done = shell("fetch", topic, "-o", "jsonl")
    assert done.rows[0] == {
        "topic": topic, "partition": 0, "offset": 0, "timestamp": NOW, "key": "k",
        "headers": [["trace", "x"], ["trace", {"base64": "/w=="}]], "value": {"id": 1},
    }  # fmt: skip
    assert shell("pub", f"{topic}.copy", "--jsonl", given=done.out).code == 0
    again = shell("fetch", f"{topic}.copy", "-o", "jsonl").rows
    assert [{**row, "topic": topic} for row in again] == done.rows
    assert shell("sub", topic, "--from", "0", "-n", "1", "-o", "json").rows == done.rows[:1]
    assert shell("fetch", topic, "-o", "raw").out == b'{"id": 1}\n\xff\n"quoted"\n1.10\n'


@pytest.mark.parametrize("text", ["{}", "[1,2.5,true,null]", '{"a":{"b":"é"}}', "12", "0.1", "-7", "123456789012345678901234567890"])
def test_json_that_stays_the_same_is_json(text: str) -> None:
    assert exact(text) != text


@pytest.mark.parametrize(
    "text",
    ["1.10", "1e5", "-0", "1E400", '{"a":1,"a":2}', '[{"b":1,"b":1}]', "[1.0,2.50]", "NaN", "{", "", '"text"', "null", "0123", '"\\ud800"'],
)
def test_what_is_no_json_or_would_change_is_text(text: str) -> None:
    assert exact(text) == text


def test_a_pattern_reads_all_topics_it_matches_and_no_dead_letters(shell: Shell) -> None:
    for number, name in enumerate(["sales.eu", "sales.us", "sales.us.dlq", "other.eu"]):
        shell.at(NOW + number * 1000)
        shell.create(name)
        publish(shell, name, name.encode())
    assert shell("fetch", "sales.*").out == b"sales.eu\nsales.us\n"
    assert shell("fetch", "*.eu").out == b"sales.eu\nother.eu\n"
    assert shell("fetch", "sales.*", "--from", "-1").out == b"sales.us\n"
    assert shell("fetch", "sales.*.dlq").out == b"sales.us.dlq\n"
    assert sorted(shell("sub", "sales.??", "--from", "earliest", "-n", "2").out.split()) == [b"sales.eu", b"sales.us"]
    none = shell("fetch", "no.such.*")
    assert (none.code, none.err) == (NOT_FOUND, "headrace: no topic matches 'no.such.*'; headrace topic list shows the topics\n")


def test_a_group_of_a_pattern_commits_what_was_printed_and_no_more(shell: Shell) -> None:
    for name in ("grouped.a", "grouped.b"):
        shell.create(name)
        publish(shell, name, b"1")
        publish(shell, name, b"2")
    follow = ["sub", "grouped.*", "--group", "g", "--from", "earliest", "-n"]
    assert len(shell(*follow, "3").out.split()) == 3
    assert len(shell(*follow, "1").out.split()) == 1
    committed = [shell.broker.committed(DEV, "g", name, 0) for name in ("grouped.a", "grouped.b")]
    assert committed == [2, 2]


def test_a_topic_created_later_is_followed_if_it_matches(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.cli.following._NEW_TOPICS_SECONDS", 0.01)
    shell.create("late.a")
    ended: list[Ended] = []
    command = threading.Thread(target=lambda: ended.append(shell("sub", "late.*", "-n", "1")), daemon=True)
    command.start()
    deadline = time.monotonic() + 300
    # Topics that exist when the command begins are followed from their end: only one created later has a record to print.
    for number in count():
        if not command.is_alive() or time.monotonic() > deadline:
            break
        shell.create(f"late.{number}")
        publish(shell, f"late.{number}", b"here")
        command.join(0.05)
    assert [(one.code, one.out) for one in ended] == [(0, b"here\n")]


@pytest.mark.parametrize("command", [["sub"], ["fetch"], ["sub", "--group", "g"], ["topic", "describe"], ["dlq", "purge", "-y"]])
def test_a_missing_topic_is_an_error_with_a_suggestion_and_is_not_created(shell: Shell, command: list[str]) -> None:
    if "payments" not in shell.server.home.engine.topics():
        shell.create("payments")
    done = shell(*command, "paymnets")
    assert done.code == NOT_FOUND and done.out == b""
    if command[0] != "dlq":
        assert done.err == "headrace: topic 'paymnets' not found; did you mean payments?\n"
    assert "paymnets" not in shell.server.home.engine.topics()


def test_numbered_names_are_no_suggestions(shell: Shell) -> None:
    shell.create("load-7")
    assert shell("fetch", "load-8").err == "headrace: topic 'load-8' not found\n"
