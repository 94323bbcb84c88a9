"""`headrace pub`: keys, headers and values of each record, pace, and which line is refused."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from itertools import count

import pytest

from headrace.broker import SchemaType
from headrace.cli.input import InputRecord, paced
from headrace.records import Record
from tests.cli.shell import Shell, shell_of_a_broker
from tests.sessions.flymq.support import DEV

NAMES = count()


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with shell_of_a_broker() as shell:
        yield shell


@pytest.fixture
def topic() -> str:
    return f"{next(NAMES)}-published"


def records(shell: Shell, topic: str) -> list[Record]:
    async def read() -> list[Record]:
        fetched = await shell.broker.fetch(DEV, topic, 0, 0, bytes_max=1 << 30)
        return [record for batch in fetched.batches for record in batch.records()]

    return shell.do(read())


def require_numbers(shell: Shell, topic: str) -> None:
    shell.create(topic)
    shell.do(shell.broker.schemas.register(DEV, "number", SchemaType.JSON, b'{"type": "number"}'))
    shell.do(shell.broker.schemas.require(DEV, topic, "number"))


def test_the_key_is_the_text_before_the_separator(shell: Shell, topic: str) -> None:
    assert shell("pub", topic, "-K", ":", given=b"a:1\nb:2:3\nnone\n").code == 0
    assert [(record.key, record.value) for record in records(shell, topic)] == [(b"a", b"1"), (b"b", b"2:3"), (None, b"none")]


def test_a_separator_may_be_a_tab_and_messages_have_keys_too(shell: Shell, topic: str) -> None:
    assert shell("pub", topic, "-K", r"\t", "k\tv").code == 0
    assert [(record.key, record.value) for record in records(shell, topic)] == [(b"k", b"v")]
    assert shell("pub", topic, "-K", r"\q", "x").code == 2


def test_headers_of_the_command_are_on_every_record(shell: Shell, topic: str) -> None:
    assert shell("pub", topic, "--header", "source=shell", "--header", "empty=", given=b"one\ntwo\n").code == 0
    assert [record.headers for record in records(shell, topic)] == [(("source", b"shell"), ("empty", b""))] * 2
    assert "is not NAME=VALUE" in shell("pub", topic, "x", "--header", "nothing").err


def test_json_lines_carry_key_value_and_headers(shell: Shell, topic: str) -> None:
    lines = [
        b'{"key": "k", "value": {"id": 1}, "headers": {"a": "1"}}',
        b'{"value": "text", "headers": [["a", "1"], ["a", {"base64": "/w=="}]]}',
        b'{"value": "/w==", "encoding": "base64", "key": "AA==", "key_encoding": "base64"}',
        b'{"key": "k", "value": null}',
        b'{"value": 1.5, "topic": "elsewhere", "partition": 7, "offset": 3, "timestamp": 1}',
    ]
    assert shell("pub", topic, "--jsonl", "--header", "h=x", given=b"\n".join(lines)).code == 0
    found = [(record.key, record.value, record.headers[1:]) for record in records(shell, topic)]
    assert found == [
        (b"k", b'{"id":1}', (("a", b"1"),)),
        (None, b"text", (("a", b"1"), ("a", b"\xff"))),
        (b"\0", b"\xff", ()),
        (b"k", None, ()),
        (None, b"1.5", ()),
    ]
    assert all(record.headers[0] == ("h", b"x") for record in records(shell, topic))


@pytest.mark.parametrize(
    "line, complaint",
    [
        (b"{", "line 3: not JSON"),
        (b"[1]", "line 3: not a JSON object"),
        (b'{"key": "k"}', "line 3: the field value is missing"),
        (b'{"vlaue": 1}', "line 3: unknown field 'vlaue'; did you mean value?"),
        (b'{"value": 1, "headers": 5}', "line 3: headers: expected"),
        (b'{"value": "x", "encoding": "rot13"}', "line 3: value: unknown encoding"),
    ],
)
def test_a_line_that_is_no_record_is_named_and_those_before_it_are_kept(shell: Shell, topic: str, line: bytes, complaint: str) -> None:
    done = shell("pub", topic, "--jsonl", given=b'{"value": "a"}\n{"value": "b"}\n' + line + b"\n")
    assert done.code == 1 and done.err.startswith(f"headrace: {complaint}") and "2 published before" in done.err
    assert [record.value for record in records(shell, topic)] == [b"a", b"b"]


@pytest.mark.parametrize("arguments", [["--jsonl", "x"], ["--jsonl", "--key", "k"], ["-K", ":", "--key", "k"], ["--rate", "0"]])
def test_options_that_contradict_are_wrong_usage(shell: Shell, topic: str, arguments: list[str]) -> None:
    assert shell("pub", topic, *arguments).code == 2


def test_a_refused_line_is_named_and_nothing_after_it_is_written(shell: Shell, topic: str) -> None:
    require_numbers(shell, topic)
    done = shell("pub", topic, given=b"1\n2\nthree\n4\n")
    assert done.code == 7
    assert done.err.startswith("headrace: line 3: schema validation failed")
    assert done.err.endswith("; 2 records published before\n")
    assert [record.value for record in records(shell, topic)] == [b"1", b"2"]


def test_a_refused_message_is_named_too(shell: Shell, topic: str) -> None:
    require_numbers(shell, topic)
    assert shell("pub", topic, "1", "x").err.startswith("headrace: message 2: schema validation failed")
    assert shell("pub", topic, "x").err.startswith("headrace: message 1: schema validation failed")


def test_receipts_have_partition_offset_and_timestamp(shell: Shell, topic: str) -> None:
    rows = shell("pub", topic, "-o", "json", given=b"a\nb\n").rows
    assert [(row["topic"], row["partition"], row["offset"]) for row in rows] == [(topic, 0, 0), (topic, 0, 1)]
    assert all(isinstance(row["timestamp"], int) for row in rows)


def test_a_new_topic_with_nearly_the_name_of_another_is_mentioned(shell: Shell) -> None:
    shell.create("invoices")
    done = shell("pub", "invocies", "x")
    assert (done.code, done.err.splitlines()[0]) == (0, "invocies: a new topic; did you mean invoices?")
    assert "did you mean" not in shell("pub", "invocies", "x").err


async def test_a_rate_spreads_records_over_time_and_does_not_make_up_for_a_pause() -> None:
    now, sent = 0.0, list[tuple[float, int]]()

    async def source() -> AsyncIterator[list[InputRecord]]:
        nonlocal now
        yield [InputRecord(b"x")] * 25
        now += 100.0  # the source pauses
        yield [InputRecord(b"x")] * 20

    async def sleep(seconds: float) -> None:
        nonlocal now
        now += seconds

    async for part in paced(source(), 200.0, clock=lambda: now, sleep=sleep):
        sent.append((round(now, 3), len(part)))
    assert sent == [(0.0, 10), (0.05, 10), (0.1, 5), (100.1, 10), (100.15, 10)]


def test_a_count_and_a_rate_publish_as_many(shell: Shell, topic: str) -> None:
    assert shell("pub", topic, "x", "--count", "5", "--rate", "100000").code == 0
    assert len(records(shell, topic)) == 5
