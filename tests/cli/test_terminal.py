"""Records cannot control the terminal, and pass unchanged through a pipe."""

from __future__ import annotations

import asyncio
import json
import os
import pty
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.cli.rows import show_rows
from headrace.cli.terminal import neutral
from tests.protocols.peers import Broker, serving

WAIT_SECONDS = 300.0
ESCAPES = {
    "clears the screen": b"\x1b[2J",
    "sets the title": b"\x1b]0;title\x07",
    "is a C1 control": "\x9b2J".encode(),
    "is a C1 byte, and no UTF-8": b"\x9b2J",
    "rings and goes back": b"\x07\x08\x7f\r",
    "turns the writing": "\u202eexe.txt\u2066".encode(),
}
HARMLESS = "plain, tab\t, café, \u3000wide, 👩\u200d👩\u200d👧".encode()


@pytest.mark.parametrize("char", [*map(chr, range(0x20)), *map(chr, range(0x7F, 0xA0)), "\u202e", "\u2028", "\u2066", "\ud800"], ids=ascii)
def test_everything_a_terminal_acts_on_is_made_visible_and_json_stays_what_it_is(char: str) -> None:
    if char in "\t\n":
        assert neutral(char) == char
        return
    assert neutral(f"a{char}b") == f"a\\u{ord(char):04x}b"
    text = json.dumps({"value": f"a{char}b"}, ensure_ascii=False)
    assert neutral(text).isprintable() and json.loads(neutral(text)) == json.loads(text)


def test_a_row_of_a_table_is_one_line_in_a_pipe(capsys: pytest.CaptureFixture[str]) -> None:
    show_rows([{"address": "a" * 90, "time": "t" * 90}], "table", columns=("address", "time"))
    assert [line.split() for line in capsys.readouterr().out.splitlines()] == [["address", "time"], ["a" * 90, "t" * 90]]


def test_harmless_characters_stay() -> None:
    assert neutral(HARMLESS.decode()) == HARMLESS.decode()


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(Path(tmp_path_factory.mktemp("broker")), quic=False) as running:
        yield running


async def fill(broker: Broker, topic: str) -> list[bytes]:
    values = [*ESCAPES.values(), HARMLESS]
    async with broker.connect("flymq") as client:
        for value in values:
            await client.publish(topic, value, key=value)
    return values


async def run(broker: Broker, *arguments: str, terminal: bool) -> bytes:
    """Return the command's stdout, a terminal or a pipe."""
    ours, theirs = pty.openpty() if terminal else os.pipe()
    try:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "headrace", *arguments),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=theirs,
            stderr=asyncio.subprocess.PIPE,
            env=dict(os.environ, HEADRACE_SERVER=broker.address, TERM="xterm", COLUMNS="400"),
        )
    finally:
        os.close(theirs)
    reading = asyncio.create_task(asyncio.to_thread(read_all, ours))
    try:
        async with asyncio.timeout(WAIT_SECONDS):
            _, errors = await process.communicate()
            out = await reading
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    assert process.returncode == 0, errors.decode()
    return out.replace(b"\r\n", b"\n") if terminal else out


def read_all(source: int) -> bytes:
    found = b""
    with open(source, "rb", buffering=0) as stream:
        try:
            while chunk := stream.read(65_536):
                found += chunk
        except OSError:
            pass  # a closed terminal raises instead of end of file
    return found


def commands(broker: Broker, topic: str, count: int) -> dict[str, list[str]]:
    subscribe = ["sub", topic, "--protocol", "flymq", "--from", "earliest", "-n", str(count)]
    fetch = ["fetch", topic, "--protocol", "flymq"]
    return {"sub": subscribe, "fetch": fetch}


@pytest.mark.parametrize("output", ["raw", "json", "jsonl", "table"])
@pytest.mark.parametrize("command", ["sub", "fetch"])
async def test_a_terminal_gets_nothing_it_would_act_on(broker: Broker, command: str, output: str) -> None:
    topic = f"t.{command}.{output}"
    values = await fill(broker, topic)
    out = await run(broker, *commands(broker, topic, len(values))[command], "-o", output, terminal=True)
    text = out.decode()
    assert "[2J" in text and "café" in text, "it is all there"
    assert neutral(text) == text
    if output == "jsonl" or (output, command) == ("json", "fetch"):
        rows = json.loads(text) if output == "json" else [json.loads(line) for line in text.splitlines()]
        assert [row["value"].encode() for row in rows if "encoding" not in row] == [value for value in values if value != b"\x9b2J"]


@pytest.mark.parametrize("command", ["sub", "fetch"])
async def test_a_pipe_gets_every_byte_as_it_is(broker: Broker, command: str) -> None:
    topic = f"t.{command}.pipe"
    values = await fill(broker, topic)
    out = await run(broker, *commands(broker, topic, len(values))[command], terminal=False)
    assert out == b"".join(value + b"\n" for value in values)
    out = await run(broker, *commands(broker, topic, len(values))[command], "-o", "jsonl", terminal=False)
    assert "\x9b" in out.decode(), "JSON may hold it as it is"


@pytest.mark.parametrize("output", ["json", "jsonl", "csv", "table"])
async def test_so_it_is_with_the_keys_of_delayed_messages_and_all_other_rows(broker: Broker, output: str) -> None:
    topic = f"delayed.{output}"
    async with broker.connect("flymq") as client:
        await client.create_topic(topic)
    key = "k\x9b2J\u202e\x7fk"
    await run(broker, "delayed", "publish", topic, "x", "--in", "1h", "--key", key, terminal=False)
    out = (await run(broker, "delayed", "list", topic, "-o", output, terminal=True)).decode()
    assert "k" in out and key not in out
    if output != "table":  # a table has its own colours
        assert neutral(out) == out
        piped = (await run(broker, "delayed", "list", topic, "-o", output, terminal=False)).decode()
        assert key in piped
