"""`headrace topic`, `group`, `dlq` and `delayed` against a broker behind a socket."""

from __future__ import annotations

import asyncio
import contextlib
import csv
import io
import json
import socket
import sys
from collections.abc import AsyncIterator
from dataclasses import dataclass, replace
from typing import Any

import pytest

from headrace.broker import SettlementPolicy
from headrace.cli import main
from headrace.records import RecordBatch
from tests.clients.flymq.support import Server, serving
from tests.sessions.flymq.support import DEV, NOW


@dataclass
class Ended:
    code: int
    out: str
    err: str

    @property
    def rows(self) -> Any:
        assert self.code == 0, self.err
        return json.loads(self.out)


def _main(arguments: tuple[str, ...]) -> Ended:
    out, err = io.StringIO(), io.StringIO()
    hook, given = sys.excepthook, sys.stdin
    sys.stdin = io.StringIO()
    try:
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), pytest.raises(SystemExit) as left:
            main(arguments)
    finally:
        sys.excepthook, sys.stdin = hook, given
    assert isinstance(left.value.code, int)
    return Ended(left.value.code, out.getvalue(), err.getvalue())


@dataclass
class Shell:
    server: Server

    async def __call__(self, *arguments: str, port: int | None = None) -> Ended:
        return await asyncio.to_thread(_main, (*arguments, "--server", f"127.0.0.1:{port or self.server.port}"))

    async def json(self, *arguments: str) -> Any:
        return (await self(*arguments, "-o", "json")).rows


@pytest.fixture
async def shell() -> AsyncIterator[Shell]:
    async with serving() as server:
        yield Shell(server)


async def _bury(shell: Shell, *values: bytes) -> None:
    broker = shell.server.home.broker
    await broker.ensure_topic(DEV, "t")
    for value in values:
        published = await broker.publish(DEV, "t", RecordBatch([value], [b"k"]))
        await broker.move_to_dead_letters(DEV, "t", published.partition, published.base_offset, error="no good")


# Topics.


async def test_a_topic_is_created_described_altered_and_deleted(shell: Shell) -> None:
    (made,) = await shell.json("topic", "create", "t", "--partitions", "2", "--ttl", "5m", "--retention-size", "1 MiB", "--compress")
    assert (made["name"], made["partitions"], made["config"]["ttl_ms"]) == ("t", 2, 300_000)
    assert (made["config"]["retention_bytes"], made["config"]["compress"]) == (1 << 20, True)
    (altered,) = await shell.json("topic", "alter", "t", "--partitions", "3", "--ttl", "0", "--dead-letter-expired")
    assert (altered["partitions"], altered["config"]["ttl_ms"], altered["config"]["compress"]) == (3, 0, True)
    (described,) = await shell.json("topic", "describe", "t")
    assert described["partitions"] == [{"first": 0, "end": 0}] * 3
    assert [row["name"] for row in await shell.json("topic", "list")] == ["t"]
    assert (await shell("topic", "delete", "t", "--yes")).code == 0
    assert await shell.json("topic", "list") == []


async def test_the_table_is_for_people(shell: Shell) -> None:
    await shell("topic", "create", "t")
    listed = await shell("topic", "list")
    assert listed.out.split() == ["name", "partitions", "records", "end", "t", "1", "0", "0"]
    described = await shell("topic", "describe", "t")
    assert "partition" in described.out and "retention ms" not in described.out and "retention_ms" in described.out


async def test_every_output_says_the_same(shell: Shell) -> None:
    for name in ("a", "b"):
        await shell("topic", "create", name)
    rows = await shell.json("topic", "list")
    lines = (await shell("topic", "list", "-o", "jsonl")).out.splitlines()
    assert [json.loads(line) for line in lines] == rows
    table = list(csv.DictReader(io.StringIO((await shell("topic", "list", "-o", "csv")).out)))
    assert [{**row, "config": json.loads(row["config"])} for row in table] == [
        {**row, **{name: str(row[name]) for name in ("partitions", "records", "end")}} for row in rows
    ]
    assert (await shell("group", "list", "-o", "csv")).out == "group,topic,partitions,lag\n"


async def test_the_exit_code_tells_the_kind_of_failure(shell: Shell, unused_tcp_port: int) -> None:
    await shell("topic", "create", "t")
    assert (await shell("topic", "create", "t")).code == 7
    missing = await shell("topic", "describe", "none")
    assert (missing.code, missing.out, missing.err) == (3, "", "headrace: topic 'none' not found\n")
    for command in (
        ("topic", "delete", "none", "-y"),
        ("group", "describe", "none"),
        ("group", "lag", "none"),
        ("group", "delete", "none", "-y"),
    ):
        assert (await shell(*command)).code == 3, command
    for command in (("dlq", "replay", "t", "0-0"), ("dlq", "purge", "t", "-y"), ("delayed", "cancel", "0-0", "-y")):
        assert (await shell(*command)).code == 3, command
    for command in (("writer", "forget", "none", "-y"), ("stage", "drop", "none", "-y")):
        assert (await shell(*command)).code == 3, command
    assert (await shell("topic", "create", "two words")).code == 1
    assert (await shell("topic", "alter", "t")).code == 2
    unreachable = await shell("topic", "list", port=unused_tcp_port)
    assert unreachable.code == 5 and "start a broker with headrace serve" in unreachable.err


@pytest.fixture
def unused_tcp_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


async def test_what_one_may_not_do_exits_with_4(shell: Shell) -> None:
    shell.server.home.broker._authorizer._authorize = lambda who, action, resource: False
    ended = await shell("topic", "create", "t")
    assert ended.code == 4 and "may not create topic" in ended.err


async def test_a_broker_that_does_not_answer_exits_with_6(shell: Shell) -> None:
    await shell("topic", "create", "t")
    shell.server.home.engine.hold("t")
    ended = await shell("delayed", "publish", "t", "x", "--in", "1h", "--timeout", "300ms")
    assert ended.code == 0, "the schedule is not held up by its topic"
    shell.server.home.engine.hold("__delayed")
    ended = await shell("delayed", "publish", "t", "x", "--in", "1h", "--timeout", "300ms")
    assert (ended.code, ended.err) == (6, "headrace: the broker did not reply within 0.3 s\n")
    shell.server.home.engine.release("__delayed")
    shell.server.home.engine.release("t")


@pytest.mark.parametrize(
    "command",
    [
        ("topic", "delete", "t"),
        ("group", "delete", "g"),
        ("group", "reset", "g", "t", "--to-latest"),
        ("dlq", "purge", "t"),
        ("dlq", "replay", "t", "--all"),
        ("delayed", "cancel", "1-1"),
        ("writer", "forget", "q"),
        ("stage", "drop", "h"),
    ],
    ids=" ".join,
)
async def test_what_destroys_asks_and_without_a_terminal_wants_yes(shell: Shell, command: tuple[str, ...]) -> None:
    await _bury(shell, b"a")
    await shell.server.home.broker.commit(DEV, "g", {("t", 0): 0})
    ended = await shell(*command)
    assert ended.code == 2 and "Give --yes" in ended.err
    assert shell.server.home.broker.committed(DEV, "g", "t", 0) == 0
    assert shell.server.home.broker.dead_letter_counts(DEV) == {"t": 1}


# Groups.


async def test_a_group_is_listed_moved_and_forgotten(shell: Shell) -> None:
    broker = shell.server.home.broker
    await broker.create_topic(DEV, "t", partitions=2)
    for partition in (0, 1):
        await broker.publish(DEV, "t", RecordBatch([b"x"] * 5), partition=partition)
    await broker.commit(DEV, "g", {("t", 0): 2})
    dry = await shell.json("group", "reset", "g", "t", "--to-latest", "--dry-run")
    assert [(row["partition"], row["before"], row["after"]) for row in dry] == [(0, 2, 5), (1, None, 5)]
    assert broker.committed(DEV, "g", "t", 0) == 2, "nothing has moved"
    await shell.json("group", "reset", "g", "t", "--to-latest", "--yes")
    assert await shell.json("group", "lag", "g") == [{"group": "g", "topic": "t", "partitions": 2, "lag": 0}]
    await shell.json("group", "reset", "g", "t", "--partition", "1", "--to-offset", "3", "--yes")
    await shell.json("group", "reset", "g", "t", "--partition", "0", "--to-offset", "99", "--yes")
    described = await shell.json("group", "describe", "g")
    assert [(row["partition"], row["committed"], row["lag"]) for row in described["partitions"]] == [(0, 5, 0), (1, 3, 2)]
    assert (described["mode"], described["members"]) == (None, []) and described["last_movement"].startswith("2023-11-14T")
    assert [row["lag"] for row in await shell.json("group", "list")] == [2]
    assert (await shell("group", "delete", "g", "--yes")).code == 0
    assert await shell.json("group", "list") == []


async def test_lag_counts_records_of_partitions_without_a_commit(shell: Shell) -> None:
    broker = shell.server.home.broker
    await broker.create_topic(DEV, "t", partitions=3)
    await broker.publish(DEV, "t", RecordBatch([b"x"] * 6), partition=2)
    await broker.commit(DEV, "g", {("t", 0): 0})
    assert await shell.json("group", "lag", "g") == [{"group": "g", "topic": "t", "partitions": 3, "lag": 6}]
    described = await shell.json("group", "describe", "g")
    assert [(row["committed"], row["lag"]) for row in described["partitions"]] == [(0, 0), (None, 0), (None, 6)]


async def test_the_members_of_a_group_are_described(shell: Shell) -> None:
    broker = shell.server.home.broker
    await broker.create_topic(DEV, "t", partitions=3)
    await broker.publish(DEV, "t", RecordBatch([b"x"] * 2), partition=0)
    member = broker.join(replace(DEV, protocol="fujin"), "g", "t", policy=SettlementPolicy(), start="earliest", address="10.0.0.7:4711#0")
    broker.join(DEV, "g", "t", policy=SettlementPolicy(), address="10.0.0.8:12")
    await member.take(1)
    described = await shell.json("group", "describe", "g")
    assert described["mode"] == "ordered"
    first, second = described["members"]
    assert (first["protocol"], first["user"], first["address"]) == ("fujin", DEV.name, "10.0.0.7:4711#0")
    assert (sorted(first["partitions"] + second["partitions"]), first["unsettled"], first["is_stalled"]) == ([0, 1, 2], 1, False)
    assert [row["lag"] for row in described["partitions"]] == [2, 0, 0]
    shown = (await shell("group", "describe", "g")).out
    assert shown.startswith("g: ordered, 2 members, last movement ")
    assert "10.0.0.7:4711#0" in shown and "10.0.0.8:12" in shown and "active" in shown


async def test_a_group_with_members_is_moved_and_deleted_only_by_force(shell: Shell) -> None:
    broker = shell.server.home.broker
    await broker.create_topic(DEV, "t")
    await broker.publish(DEV, "t", RecordBatch([b"x"] * 3))
    member = broker.join(DEV, "g", "t", policy=SettlementPolicy(), start="earliest")
    member.ack([delivery.id for delivery in await member.take(3)])
    await member.flush()
    for command in (("group", "reset", "g", "t", "--to-earliest", "--yes"), ("group", "delete", "g", "--yes")):
        refused = await shell(*command)
        assert refused.code == 1 and "has 1 active member; stop it, or give --force" in refused.err
    assert (await shell("group", "reset", "g", "t", "--to-earliest", "--yes", "--force")).code == 0
    assert len(await member.take(10)) == 3, "the member continues at the new offset"
    assert (await shell("group", "delete", "g", "--yes", "--force")).code == 0
    assert broker.groups(DEV) == [] and broker.members(DEV, "g") == []


async def test_a_group_is_moved_to_a_time(shell: Shell) -> None:
    home = shell.server.home
    await home.broker.create_topic(DEV, "t")
    for step in range(3):
        home.now = NOW + step * 60_000
        await home.broker.publish(DEV, "t", RecordBatch([b"x"]))
    moved = await shell.json("group", "reset", "g", "t", "--to-datetime", "2023-11-14T22:13:21Z", "--yes")
    assert [row["after"] for row in moved] == [1]
    assert (await shell("group", "reset", "g", "t", "--to-datetime", "yesterday")).code == 2
    assert (await shell("group", "reset", "g", "t", "--to-earliest", "--to-latest")).code == 2


# Dead letters and delayed messages.


async def test_dead_letters_are_shown_replayed_and_purged(shell: Shell) -> None:
    await _bury(shell, b"a", b"\xff", b"c")
    assert await shell.json("dlq", "list") == [{"topic": "t", "waiting": 3}]
    rows = await shell.json("dlq", "fetch", "t")
    assert [(row["id"], row["value"], row["reason"]) for row in rows] == [
        ("0-0", "a", "moved: no good"),
        ("0-1", "base64:/w==", "moved: no good"),
        ("0-2", "c", "moved: no good"),
    ]
    assert rows[0]["last_failure"] == "2023-11-14T22:13:20.000Z"
    assert [row["id"] for row in await shell.json("dlq", "fetch", "t", "--after", "0-0", "-n", "1")] == ["0-1"]
    assert await shell.json("dlq", "replay", "t", "0-1") == [{"id": "0-1", "topic": "t", "partition": 0, "offset": 3}]
    assert [row["id"] for row in await shell.json("dlq", "replay", "t", "--all", "--yes")] == ["0-0", "0-2"]
    assert await shell.json("dlq", "fetch", "t") == []
    assert (await shell("dlq", "discard", "t", "0-0", "--yes")).code == 3, "it is done already"
    assert [row["replayed"] for row in await shell.json("dlq", "fetch", "t", "--replayed")] == [True] * 3
    assert (await shell("dlq", "replay", "t")).code == 2
    assert (await shell("dlq", "purge", "t", "--yes")).code == 0
    assert await shell.json("dlq", "list") == []


async def test_a_delayed_message_is_published_listed_and_cancelled(shell: Shell) -> None:
    (made,) = await shell.json("delayed", "publish", "t", "hello", "--in", "1h", "--key", "k")
    assert made["due"] == "2023-11-14T23:13:20.000Z"
    (waiting,) = await shell.json("delayed", "list")
    assert (waiting["id"], waiting["topic"], waiting["key"], waiting["size"]) == (made["id"], "t", "k", 5)
    assert await shell.json("delayed", "list", "other") == []
    assert (await shell("delayed", "cancel", made["id"], "--topic", "other", "-y")).code == 3
    assert (await shell("delayed", "cancel", made["id"], "-y")).code == 0
    assert await shell.json("delayed", "list") == []
    assert (await shell("delayed", "publish", "t", "x")).code == 2
    assert (await shell("delayed", "publish", "t", "x", "--in", "1h", "--at", "2030-01-01")).code == 2


# Exactly-once writers.


async def test_writers_and_stages_are_listed_forgotten_and_dropped(shell: Shell) -> None:
    broker = shell.server.home.broker
    await broker.ensure_topic(DEV, "t")
    for handle in ("h1", "h2", "h3"):
        await broker.stage(DEV, handle, "t", RecordBatch([b"abc"]), writer="q", epoch="r1")
        await broker.seal(DEV, handle)
    await broker.publish_staged(DEV, "q", 7, ["h1"], epoch="r1")
    assert await shell.json("writer", "list") == [
        {"writer": "q", "version": 7, "at": "2023-11-14T22:13:20.000Z", "epoch": "r1", "is_publishing": False}
    ]
    rows = await shell.json("stage", "list")
    assert [(row["handle"], row["writer"], row["records"], row["size_bytes"], row["by_topic"]) for row in rows] == [
        ("h2", "q", 1, 3, {"t": 1}),
        ("h3", "q", 1, 3, {"t": 1}),
    ]
    assert (await shell("stage", "drop", "h2", "none", "-y")).code == 0
    assert [row["handle"] for row in await shell.json("stage", "list")] == ["h3"]
    assert (await shell("writer", "forget", "q", "-y")).code == 0
    assert (await shell.json("writer", "list"), await shell.json("stage", "list")) == ([], [])


async def test_quiet_prints_nothing_about_what_was_made(shell: Shell) -> None:
    for command in (("topic", "create", "t", "-q"), ("topic", "alter", "t", "--partitions", "2", "--quiet")):
        done = await shell(*command)
        assert (done.code, done.out, done.err) == (0, "", "")
