"""The Figg page is correct: its hex decodes to its captions, its code runs, its names exist."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace.records import RecordBatch
from headrace.server.config import SETTINGS
from headrace.sessions.figg.session import FiggSession
from headrace.wire.figg import (
    AckBatch,
    Attach,
    Attached,
    ClientMessage,
    DataBatch,
    Detach,
    Detached,
    Ping,
    Pong,
    PublishBatch,
    ServerMessage,
    client_decoder,
    server_decoder,
)
from tests.clients.servers import figg_server
from tests.net.polling import until
from tests.sessions.figg.peer import WHO

PAGE = (Path(__file__).parent.parent.parent / "docs" / "protocols" / "figg.md").read_text(encoding="utf-8")
EXAMPLES = [line for block in re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]


def told(message: ClientMessage | ServerMessage) -> Iterator[str]:
    """The caption of each frame, in the words of the page."""
    match message:
        case Attach(_, offset):
            yield "ATTACH at the end" if offset is None else f"ATTACH from offset {offset}"
        case Attached(_, offset):
            yield f"ATTACHED at {offset}"
        case Detach():
            yield "DETACH"
        case Detached():
            yield "DETACHED"
        case PublishBatch(_, numbers, values):
            yield from (f'PUBLISH {number}: "{value.decode()}"' for number, value in zip(numbers, values, strict=True))
        case DataBatch(_, numbers, values):
            yield from (f'DATA, offset {number}: "{value.decode()}"' for number, value in zip(numbers, values, strict=True))
        case AckBatch(seqs):
            yield from (f"ACK {seq}" for seq in seqs)
        case Ping(timestamp):
            yield f"PING {timestamp}"
        case Pong(timestamp):
            yield f"PONG {timestamp}"


@pytest.mark.parametrize("line", EXAMPLES)
def test_every_example_decodes_to_its_caption(line: str) -> None:
    found = re.fullmatch(r"((?:[0-9a-f]+ )+)\s*(\S.*)", line)
    assert found is not None
    frame = bytes.fromhex(found[1])
    messages: list[ClientMessage | ServerMessage] = [*server_decoder().feed(frame), *client_decoder().feed(frame)]
    assert [caption for message in messages for caption in told(message)] == [found[2]]
    assert all(getattr(message, "topic", "demo") == "demo" for message in messages)


def test_there_are_examples_of_every_frame() -> None:
    assert {line[:4] for line in EXAMPLES} == {f"{kind:04x}" for kind in range(1, 10)}


class RecordedLink:
    """Takes what a session sends."""

    peer = "page"
    unsent_bytes = 0

    def __init__(self) -> None:
        self.sent = b""

    def send(self, frames: bytes) -> None:
        self.sent += frames

    def close(self, reason: str, *, error: bool = True) -> None:
        raise AssertionError(reason)

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...


@pytest.mark.parametrize("block", re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL)[:2])
async def test_a_session_answers_as_the_page_shows(block: str) -> None:
    """The frames of the client are sent in turn, and the session's answers are the server's frames beside them."""
    frames = [bytes.fromhex(re.match(r"(?:[0-9a-f]+ )+", line)[0]) for line in block.splitlines()]  # type: ignore[index]  # tested above
    async with figg_server() as server:
        if "ATTACH" in block:
            await server.broker.ensure_topic(WHO, "demo")
            await server.broker.publish(WHO, "demo", RecordBatch([b"hi", b"you"]), partition=0)
        link = RecordedLink()
        session = FiggSession(server.broker, link, WHO)
        requests = [frame for frame in frames if list(server_decoder().feed(frame))]
        answers = [frame for frame in frames if frame not in requests]
        for request in requests:
            if list(server_decoder().feed(request)) == [Detach("demo")]:
                await until(lambda: len(link.sent) == len(b"".join(answers[:-1])))
            session.receive(request)
        await until(lambda: len(link.sent) >= len(b"".join(answers)))
        assert link.sent == b"".join(answers)
        session.lost()


async def test_the_python_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (example,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
    async with figg_server() as server:
        names: dict[str, object] = {}
        exec(example.replace('"127.0.0.1", 8119', f'"{server.host}", {server.port}'), names)
        main = names["main"]
        assert callable(main)
        await main()
    assert capsys.readouterr().out.splitlines() == ["0 b'hello'", "1 b'a'", "2 b'b'", "3 b'c'"]


@pytest.mark.parametrize("key", sorted(set(re.findall(r"`((?:figg|limits|topics)\.[a-z_]+)`", PAGE))))
def test_every_setting_the_page_names_exists(key: str) -> None:
    assert key in SETTINGS
