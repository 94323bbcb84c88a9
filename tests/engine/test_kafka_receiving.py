"""Frames of a connection to Kafka, whatever the chunks in which they arrive."""

from __future__ import annotations

import asyncio
from io import BytesIO
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from headrace.engine.kafka.receiving import Frames, _View, receive_frames


class Inner(asyncio.Protocol):
    def __init__(self) -> None:
        self.calls: list[str] = []

    def eof_received(self) -> bool:
        self.calls.append("eof")
        return True

    def connection_lost(self, failure: Exception | None) -> None:
        self.calls.append(f"lost {failure}")

    def pause_writing(self) -> None:
        self.calls.append("pause")

    def resume_writing(self) -> None:
        self.calls.append("resume")


class Transport:
    def __init__(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self.protocol

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self.protocol = protocol


class Connection:
    """The parts of a connection of aiokafka that the reception uses."""

    def __init__(self) -> None:
        self._protocol = Inner()
        self._requests: list[object] = []
        self._reader: Any = self
        self._writer: Any = self
        self._buffer = bytearray()
        self.transport = Transport(self._protocol)
        self.frames: list[bytes] = []
        self.frames_max = 1_000

    def connected(self) -> bool:
        return len(self.frames) < self.frames_max

    def _handle_frame(self, frame: bytes) -> None:
        assert type(frame) is bytes, "the library shares it with a reader of bytes"
        self.frames.append(frame)


def encoded(frames: list[bytes]) -> bytes:
    return b"".join(len(frame).to_bytes(4, "big") + frame for frame in frames)


@given(st.lists(st.binary(max_size=40), max_size=8), st.lists(st.integers(1, 50), min_size=1, max_size=20))
def test_frames_cut_anywhere_are_the_same_frames(frames: list[bytes], sizes: list[int]) -> None:
    connection, stream, start = Connection(), encoded(frames), 0
    received = Frames(connection)
    for turn in range(len(stream)):
        chunk = stream[start : start + sizes[turn % len(sizes)]]
        if chunk:
            received.data_received(chunk)
        start += len(chunk)
    assert connection.frames == frames


def test_nothing_is_handed_to_a_connection_that_was_closed() -> None:
    connection = Connection()
    connection.frames_max = 1
    Frames(connection).data_received(encoded([b"a", b"b"]))
    assert connection.frames == [b"a"]


def test_a_connection_is_changed_only_once_and_only_while_it_is_idle() -> None:
    connection = Connection()
    connection._requests.append(object())
    receive_frames(connection)
    assert connection.transport.protocol is connection._protocol
    connection._requests.clear()
    connection._buffer += b"\0"
    receive_frames(connection)
    assert connection.transport.protocol is connection._protocol
    connection._buffer.clear()
    receive_frames(connection)
    frames = connection.transport.protocol
    assert isinstance(frames, Frames)
    receive_frames(connection)
    assert connection.transport.protocol is frames


def test_the_library_learns_everything_else() -> None:
    connection = Connection()
    frames = Frames(connection)
    assert frames.eof_received()
    frames.pause_writing()
    frames.resume_writing()
    frames.connection_lost(OSError("gone"))
    assert connection._protocol.calls == ["eof", "pause", "resume", "lost gone"]


def test_records_stay_in_the_response_that_may_be_closed_before_them() -> None:
    response = (3).to_bytes(4, "big") + b"abc" + b"rest"
    data = BytesIO(response)
    view = _View.decode(data)
    assert view is not None
    assert (bytes(view), view.obj is response, view.readonly) == (b"abc", True, True)
    assert data.read() == b"rest"
    data.close()
    assert bytes(view) == b"abc"
