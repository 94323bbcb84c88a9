"""`headrace pub` and `headrace sub` as a user runs them, through Figg: processes, pipes, signals."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from headrace.clients.figg.client import FiggClient
from tests.clients.servers import FiggServer, figg_server
from tests.net.polling import until

WAIT_SECONDS = 300.0


@dataclass
class Ended:
    code: int | None
    out: bytes
    err: str


@asynccontextmanager
async def running(server: FiggServer | None, *arguments: str, stdin: int | None = None) -> AsyncIterator[asyncio.subprocess.Process]:
    environment = dict(os.environ, HEADRACE_SERVER="" if server is None else f"figg://{server.host}:{server.port}")
    if server is None:
        del environment["HEADRACE_SERVER"]
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", *arguments),
        stdin=asyncio.subprocess.PIPE if stdin is None else stdin,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env=environment,
    )
    try:
        yield process
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


async def ended(process: asyncio.subprocess.Process, given: bytes | None = None) -> Ended:
    async with asyncio.timeout(WAIT_SECONDS):
        out, err = await process.communicate(given)
    return Ended(process.returncode, out, err.decode())


async def run(server: FiggServer | None, *arguments: str, given: bytes | None = b"") -> Ended:
    async with running(server, *arguments) as process:
        return await ended(process, given)


async def fill(server: FiggServer, topic: str, values: list[bytes]) -> None:
    async with await FiggClient.connect(server.host, server.port) as client:
        await client.publish_many(topic, values)


async def test_messages_given_as_arguments_are_records() -> None:
    async with figg_server() as server:
        done = await run(server, "pub", "demo", "hello", "wörld")
        assert (done.code, done.out) == (0, b"")
        assert done.err.startswith("demo: 2 records acknowledged in ") and done.err.endswith(" ms\n")
        assert await server.values_in("demo") == [b"hello", "wörld".encode()]


async def test_lines_of_standard_input_are_records_and_the_last_may_lack_its_end() -> None:
    async with figg_server() as server:
        done = await run(server, "pub", "demo", "-q", given=b"one\n\ntwo\r\n\xff\xfe")
        assert (done.code, done.out, done.err) == (0, b"", "")
        assert await server.values_in("demo") == [b"one", b"", b"two\r", b"\xff\xfe"]


async def test_a_file_is_published_by_lines_or_whole(tmp_path: Path) -> None:
    file = tmp_path / "input"
    file.write_bytes(b"a\nb\n" * 50_000)
    async with figg_server() as server:
        assert (await run(server, "pub", "lines", "--file", str(file))).code == 0
        assert (await run(server, "pub", "whole", "--file", str(file), "--whole")).code == 0
        assert await server.values_in("lines") == [b"a", b"b"] * 50_000
        assert await server.values_in("whole") == [b"a\nb\n" * 50_000]


async def test_a_count_repeats_the_messages() -> None:
    async with figg_server() as server:
        done = await run(server, "pub", "demo", "x", "y", "--count", "3")
        assert done.err.startswith("demo: 6 records acknowledged")
        assert await server.values_in("demo") == [b"x", b"y"] * 3


async def test_nothing_on_standard_input_is_no_record() -> None:
    async with figg_server() as server:
        done = await run(server, "pub", "demo")
        assert (done.code, done.err.split(" in ")[0]) == (0, "demo: 0 records acknowledged")


async def test_lines_are_published_as_they_are_typed() -> None:
    async with figg_server() as server, running(server, "pub", "demo") as process:
        assert process.stdin is not None
        process.stdin.write(b"first\n")
        await process.stdin.drain()
        await until(lambda: "demo" in server.engine.topics() and server.engine.bounds("demo", 0).end == 1)
        process.send_signal(signal.SIGINT)
        done = await ended(process)
        assert done.code == 130
        assert done.err.startswith("demo: 1 record acknowledged in ")


@pytest.mark.parametrize(
    "output, wanted",
    [
        ("raw", b'{"id": 1}\nplain\n\xff\n'),
        ("hex", b"7b226964223a20317d\n706c61696e\nff\n"),
    ],
)
async def test_values_are_printed_in_the_chosen_format(output: str, wanted: bytes) -> None:
    async with figg_server() as server:
        await fill(server, "demo", [b'{"id": 1}', b"plain", b"\xff", b"too many"])
        done = await run(server, "sub", "demo", "--from", "earliest", "-n", "3", "-o", output)
        assert (done.code, done.out, done.err) == (0, wanted, "")


@pytest.mark.parametrize("output", ["json", "jsonl"])
async def test_json_is_an_object_a_line_whatever_the_value(output: str) -> None:
    values = [b'{"id": 1}', "naïve".encode(), b"\xff\x00", b"NaN", b'"\\ud800"', b"[" * 100_000, b""]
    async with figg_server() as server:
        await fill(server, "demo", values)
        done = await run(server, "sub", "demo", "--from", "0", "-n", str(len(values)), "-o", output)
        rows = [json.loads(line) for line in done.out.decode().splitlines()]
        assert done.code == 0
        assert [row["offset"] for row in rows] == list(range(len(values)))
        assert all((row["topic"], row["partition"], row["key"]) == ("demo", 0, None) for row in rows)
        assert [row["value"] for row in rows] == [{"id": 1}, "naïve", "/wA=", "NaN", '"\\ud800"', "[" * 100_000, ""]
        assert [row.get("encoding") for row in rows] == [None, None, "base64", None, None, None, None]


async def test_reading_starts_at_an_offset_and_follows_until_interrupted() -> None:
    async with figg_server() as server:
        await fill(server, "demo", [b"a", b"b"])
        async with running(server, "sub", "demo", "--from", "1") as process:
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), WAIT_SECONDS) == b"b\n"
            await fill(server, "demo", [b"c"])
            assert await asyncio.wait_for(process.stdout.readline(), WAIT_SECONDS) == b"c\n"
            process.send_signal(signal.SIGINT)
            done = await ended(process)
            assert (done.code, done.out, done.err) == (130, b"", "")


async def test_a_missing_offset_is_reported() -> None:
    async with figg_server() as server:
        await fill(server, "demo", [b"a"])
        async with running(server, "sub", "demo", "--from", "99", "-n", "1") as process:
            assert process.stderr is not None
            line = await asyncio.wait_for(process.stderr.readline(), WAIT_SECONDS)
            assert line == b"demo: offset 99 does not exist; starting at 1\n"


@pytest.mark.parametrize("values", [[bytes(1_000)] * 2_000, [bytes(20)]], ids=["in the middle", "when all is read"])
async def test_a_reader_of_the_output_may_leave(values: list[bytes]) -> None:
    async with figg_server() as server:
        await fill(server, "demo", values)
        async with running(server, "sub", "demo", "--from", "earliest") as process:
            assert process.stdout is not None
            await process.stdout.readexactly(10)
            process.stdout._transport.close()  # type: ignore[attr-defined]  # the only way to close our end of the pipe
            async with asyncio.timeout(WAIT_SECONDS):
                assert process.stderr is not None
                assert await process.stderr.read() == b""
                assert await process.wait() == 0


@pytest.mark.parametrize("time", ["5m", "2026-11-15", "2026-11-15T07:49:00Z"])
async def test_a_time_is_rejected_with_the_reason(time: str) -> None:
    done = await run(None, "sub", "demo", "--from", time, "--protocol", "figg")
    assert done.code == 2
    assert "the figg protocol does not support times; use earliest, latest or an offset" in done.err
    assert len(done.err.splitlines()) == 1


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["sub", "demo", "--from", "yesterday"], "invalid; expected earliest, latest, an offset, -N or a time"),
        (["sub", "demo", "--server", "nowhere"], "is not HOST:PORT"),
        (["sub", "demo", "-n", "0"], "0 is not in the range"),
        (["pub", "demo", "message", "--file", "-"], "give either messages, or --file"),
        (["pub", "demo", "--count", "2"], "--count requires a MESSAGE argument"),
        (["pub"], "Missing argument 'TOPIC'"),
    ],
)
async def test_wrong_usage_is_one_line_and_code_two(arguments: list[str], complaint: str) -> None:
    done = await run(None, *arguments)
    assert (done.code, done.out, len(done.err.splitlines())) == (2, b"", 1)
    assert complaint in done.err


@pytest.mark.parametrize("command", [["pub", "demo", "hello"], ["sub", "demo"]])
async def test_no_broker_is_one_clear_line_with_a_hint(command: list[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    done = await run(None, *command, "--server", f"127.0.0.1:{port}")
    assert (done.code, done.out) == (5, b"")
    assert done.err == (
        f"headrace: cannot connect to 127.0.0.1:{port}: connection refused; start a broker with "
        "headrace serve, or give another address with --server\n"
    )


async def test_a_lost_connection_is_reported_and_the_client_reconnects() -> None:
    async with figg_server() as server:
        await fill(server, "demo", [b"a"])
        async with running(server, "sub", "demo", "--from", "earliest", "-n", "2") as process:
            assert process.stdout is not None
            assert await asyncio.wait_for(process.stdout.readline(), WAIT_SECONDS) == b"a\n"
            await server.restart()
            await fill(server, "demo", [b"b"])
            done = await ended(process)
            assert (done.code, done.out) == (0, b"b\n")
            assert "; reconnecting\n" in done.err
