"""The RustLog page is correct: its exchanges run as printed, its code runs, its limits match the code."""

from __future__ import annotations

import asyncio
import re
from itertools import chain
from pathlib import Path

import pytest

from headrace import limits
from headrace.wire.rustlog import ReplyDecoder, RequestDecoder
from headrace.wire.rustlog import errors as refusals
from headrace.wire.rustlog.codec import Received
from headrace.wire.rustlog.messages import Dialect
from tests.clients.rustlog.support import WAIT_SECONDS, serving
from tests.sessions.rustlog.support import running_server

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocols" / "rustlog.md").read_text(encoding="utf-8")


def framed(text: str) -> bytes:
    return len(text.encode()).to_bytes(4, "big") + text.encode()


def frames(block: str, language: str) -> list[bytes]:
    if language == "json":
        return [framed(line) for line in block.splitlines()]
    return [bytes.fromhex(re.match(r"(?:[0-9a-f]+ )+", line)[0]) for line in block.splitlines()]  # type: ignore[index]  # fails the test


CONVERSATION = list(
    chain.from_iterable(frames(block, language) for language, block in re.findall(r"```(json|hex)\n(.*?)```", PAGE, re.DOTALL))
)


async def test_every_request_of_the_page_gets_the_reply_on_the_page() -> None:
    async with running_server() as home:
        peer = home.connect()
        for request, reply in zip(CONVERSATION[::2], CONVERSATION[1::2], strict=True):
            before = len(peer.wire.sent)
            peer.send(request)
            await peer.replies(1)
            assert bytes(peer.wire.sent[before:]) == reply, f"after {request!r}"


def test_every_frame_of_the_page_is_one_message() -> None:
    for request, reply in zip(CONVERSATION[::2], CONVERSATION[1::2], strict=True):
        (asked,) = RequestDecoder().feed(request)
        assert isinstance(asked, Received)
        assert len(ReplyDecoder().feed(reply)) == 1


async def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    async with asyncio.timeout(WAIT_SECONDS), serving() as server:
        names: dict[str, object] = {}
        exec(example.replace('"127.0.0.1", 9092', f'"127.0.0.1", {server.port}'), names)
        main = names["main"]
        assert callable(main)
        await main()
    assert capsys.readouterr().out.splitlines() == ["1 0", "[]", "0 b'hello'", "1 b'a'", "2 b'b'", "3 b'c'", "4"]


@pytest.mark.parametrize(
    "text",
    [
        f"{limits.RUSTLOG_FRAME_BYTES_MAX:,} bytes",
        f"{limits.RUSTLOG_PRODUCE_RECORDS_MAX:,} records",
        f"{limits.RUSTLOG_REQUESTS_IN_FLIGHT_MAX:,} of them",
        f"{limits.IN_FLIGHT_BYTES_MAX // limits.MIB} MiB",
        f"{limits.RUSTLOG_STRAY_OFFSETS_MAX:,} of them",
        f"{limits.RUSTLOG_STALL_SECONDS_MAX:.0f} seconds",
        f"above {limits.PARTITIONS_PER_TOPIC_MAX:,}",
        f"at most {limits.TOPIC_NAME_BYTES_MAX} bytes",
    ],
)
def test_the_limits_of_the_page_are_the_limits(text: str) -> None:
    assert text in PAGE


@pytest.mark.parametrize(
    "text",
    [
        refusals.bad_length(Dialect.JSON, 0).message,
        refusals.bad_length(Dialect.BINARY, 0).message,
        refusals.bad_length(Dialect.JSON, 77).message.replace("77", "N"),
        refusals.bad_length(Dialect.BINARY, 77).message.replace("77", "N"),
        refusals.no_partition(Dialect.JSON, "T", 77).message.replace("77", "P"),
        refusals.no_partition(Dialect.BINARY, "T", 77).message.replace("77", "P"),
        refusals.offset_out_of_range(Dialect.JSON, 77, 88).message.replace("77", "X").replace("88", "Y"),
        refusals.offset_out_of_range(Dialect.BINARY, 77, 88).message.replace("77", "X").replace("88", "Y"),
        refusals.record_does_not_fit(Dialect.JSON, 77, 88, fits_binary=True).message.replace("77", "N").replace("88", "S"),
        refusals.topic_exists("T").message,
        refusals.invalid_partition_count(77).message.replace("77", "N"),
    ],
)
def test_the_texts_of_the_page_are_the_texts(text: str) -> None:
    assert f"`{text}`" in PAGE or f" {text}`" in PAGE
