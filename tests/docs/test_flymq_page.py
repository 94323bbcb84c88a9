"""The FlyMQ page is correct: its exchanges run as printed, its code runs, its limits match the code."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path

import pytest

from headrace import limits
from headrace.server.config import SETTINGS
from headrace.sessions.flymq import filter as flymq_filter
from headrace.sessions.flymq.staging import RECORD_BYTES_MAX
from headrace.wire.flymq import Opcode, ReplyDecoder, RequestDecoder, opcode_of
from headrace.wire.flymq.advanced_messages import DelayedBatch, TxnBeginBatch, TxnWholeBatch
from headrace.wire.flymq.framing import MESSAGE_BYTES_MAX
from headrace.wire.flymq.messages import Broken, CommitBatch, Malformed, Packed, ProduceMany, UnknownOpcode
from headrace.wire.flymq.opcodes import SPECIFIED
from headrace.wire.flymq.table import SPOKEN
from tests.clients.flymq.support import WAIT_SECONDS, serving
from tests.sessions.flymq.support import running_server

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocols" / "flymq.md").read_text(encoding="utf-8")
LINES = [line for block in re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def parted(line: str) -> tuple[bytes, str]:
    """The frame and its caption, which stands three or more spaces behind it."""
    found = re.fullmatch(r"([0-9a-f ]+?) {3,}(\S.*)", line)
    assert found is not None, line
    return bytes.fromhex(found[1]), found[2]


REQUESTS = [parted(line) for line in LINES[0::2]]
REPLIES = [parted(line) for line in LINES[1::2]]


@pytest.mark.parametrize(("frame", "caption"), REQUESTS, ids=[caption for _, caption in REQUESTS])
def test_every_request_is_one_whole_frame_and_named_by_its_caption(frame: bytes, caption: str) -> None:
    (event,) = RequestDecoder().feed(frame)
    assert not isinstance(event, Broken | CommitBatch | DelayedBatch | Packed | ProduceMany | TxnBeginBatch | TxnWholeBatch | UnknownOpcode)
    opcode = event.opcode if isinstance(event, Malformed) else opcode_of(event)
    assert re.split(r"[ ,]", caption)[0] == Opcode(opcode).name


@pytest.mark.parametrize(("frame", "caption"), REPLIES, ids=[caption for _, caption in REPLIES])
def test_every_reply_is_one_whole_frame(frame: bytes, caption: str) -> None:
    (event,) = ReplyDecoder().feed(frame)
    assert not isinstance(event, Broken)
    for text in re.findall(r'"([^"…]+)"', caption):
        assert text.encode() in frame


async def test_the_exchanges_run_as_printed() -> None:
    async with running_server() as home:
        peer = home.peer()
        for (request, caption), (reply, _) in zip(REQUESTS, REPLIES, strict=True):
            said = len(peer.wire.sent)
            peer.session.receive(request)
            async with asyncio.timeout(WAIT_SECONDS):
                while len(peer.wire.sent) - said < len(reply):
                    assert peer.wire.closed is None
                    peer.wire.changed.clear()
                    await peer.wire.changed.wait()
            assert peer.wire.sent[said:] == reply, caption


def test_every_supported_opcode_has_an_example_and_a_row() -> None:
    shown = {frame[2] for frame, _ in REQUESTS}
    assert shown <= SPOKEN
    assert shown >= SPOKEN
    rows = {int(number, 16): name for number, name in re.findall(r"^\| ([0-9A-F]{2}) \| ([A-Z_]+) \|", PAGE, re.MULTILINE)}
    assert rows == {opcode: Opcode(opcode).name for opcode in SPOKEN}


def test_every_opcode_of_the_specification_is_supported() -> None:
    assert SPECIFIED == SPOKEN


@pytest.mark.parametrize(
    ("text", "number"),
    [
        ("a payload has at most 33,554,432 bytes", limits.FLYMQ_PAYLOAD_BYTES_MAX),
        ("a record above 33,554,404 bytes", RECORD_BYTES_MAX),
        ("holds at most 4 MiB", limits.FLYMQ_FETCH_BYTES_MAX),
        ("256 MiB are read", limits.FLYMQ_SCAN_BYTES_MAX),
        ("read at most 4 MiB ahead", limits.IN_FLIGHT_BYTES_MAX),
        ("in the first 64 KiB of a key", flymq_filter.PATTERN_TEXT_BYTES_MAX),
        ("at most 32 MiB decompressed", limits.FLYMQ_PAYLOAD_BYTES_MAX),
        ("Texts have at most 127 bytes", MESSAGE_BYTES_MAX),
        ("At most 100,000", limits.DELAYED_MAX),
        ("of 256 MiB together wait", limits.DELAYED_BYTES_MAX),
        ("each of at most 16 MiB", limits.DELAYED_RECORD_BYTES_MAX),
        ("holds at most 256 MiB", limits.TRANSACTION_BYTES_MAX),
        ("10,000 may be open", limits.TRANSACTIONS_OPEN_MAX),
        ("1,000 of them on one connection", limits.FLYMQ_TRANSACTIONS_MAX),
        ("up to 1,000, all or none", limits.DEAD_LETTERS_REPLAYED_MAX),
    ],
)
def test_every_number_on_the_page_matches_the_code(text: str, number: int) -> None:
    assert text in PAGE
    found = re.search(r"([\d,]+)(?: (KiB|MiB))?(?: bytes)?", text)
    assert found is not None
    assert int(found[1].replace(",", "")) * {None: 1, "KiB": 1 << 10, "MiB": 1 << 20}[found[2]] == number


@pytest.mark.parametrize("key", sorted(set(re.findall(r"`((?:flymq|limits|topics)\.[a-z_]+)", PAGE))))
def test_every_setting_the_page_names_exists(key: str) -> None:
    assert key in SETTINGS


async def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    async with serving() as server, asyncio.timeout(WAIT_SECONDS):
        names: dict[str, object] = {}
        exec(example.replace('"127.0.0.1", 9092', f'"127.0.0.1", {server.port}'), names)
        main = names["main"]
        assert callable(main)
        await main()
    assert capsys.readouterr().out.splitlines() == [
        "0 0",
        "[b'a', b'b', b'c']",
        "0 b'hello'",
        "1 b'a'",
        "2 b'b'",
        "3 b'c'",
        "4",
    ]
