"""The golden vectors, both ways."""

from __future__ import annotations

import pytest

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
    encode,
    server_decoder,
)
from tests.wire.figg import streams

TO_SERVER: list[tuple[bytes, ClientMessage, bytes]] = [
    (streams.ATTACH_FOO_LATEST, Attach("foo", None), encode.attach("foo")),
    (streams.ATTACH_FOO_FROM_7, Attach("foo", 7), encode.attach("foo", 7)),
    (streams.DETACH_FOO, Detach("foo"), encode.detach("foo")),
    (streams.PUBLISH_FOO_0_BAR, PublishBatch("foo", [0], [b"bar"]), encode.publish("foo", [0], [b"bar"])),
    (streams.PING_12345, Ping(12345), encode.ping(12345)),
]
TO_CLIENT: list[tuple[bytes, ServerMessage, bytes]] = [
    (streams.ATTACHED_FOO_0, Attached("foo", 0), encode.attached("foo", 0)),
    (streams.DETACHED_FOO, Detached("foo"), encode.detached("foo")),
    (streams.ACK_0, AckBatch([0]), encode.ack(0)),
    (streams.DATA_FOO_7_BAR, DataBatch("foo", [7], [b"bar"]), encode.data("foo", [7], [b"bar"])),
    (streams.PONG_12345, Pong(12345), encode.pong(12345)),
]


@pytest.mark.parametrize("frame, message, encoded", TO_SERVER)
def test_a_server_reads_each_vector_and_a_client_writes_it(frame: bytes, message: ClientMessage, encoded: bytes) -> None:
    assert list(server_decoder().feed(frame)) == [message]
    assert encoded == frame


@pytest.mark.parametrize("frame, message, encoded", TO_CLIENT)
def test_a_client_reads_each_vector_and_a_server_writes_it(frame: bytes, message: ServerMessage, encoded: bytes) -> None:
    assert list(client_decoder().feed(frame)) == [message]
    assert encoded == frame


@pytest.mark.parametrize("frame", [frame for frame, _, _ in TO_CLIENT])
def test_a_server_ignores_what_is_bound_for_clients(frame: bytes) -> None:
    assert list(server_decoder().feed(frame + streams.PING_12345)) == [Ping(12345)]


@pytest.mark.parametrize("frame", [frame for frame, _, _ in TO_SERVER])
def test_a_client_ignores_what_is_bound_for_servers(frame: bytes) -> None:
    assert list(client_decoder().feed(frame + streams.PONG_12345)) == [Pong(12345)]


@pytest.mark.parametrize("flags", [0x8000, 0x0001, 0x0002, 0x8003, 0xFFFF])
def test_every_reading_of_flag_bit_one_means_from_the_offset(flags: int) -> None:
    frame = streams.ATTACH_FOO_FROM_7[:8] + flags.to_bytes(2, "big") + streams.ATTACH_FOO_FROM_7[10:]
    assert list(server_decoder().feed(frame)) == [Attach("foo", 7)]


@pytest.mark.parametrize("flags", [0, 0x4000, 0x0004, 0x7FFC])
def test_other_flags_are_ignored(flags: int) -> None:
    frame = streams.ATTACH_FOO_FROM_7[:8] + flags.to_bytes(2, "big") + streams.ATTACH_FOO_FROM_7[10:]
    assert list(server_decoder().feed(frame)) == [Attach("foo", None)]


def test_empty_topics_and_empty_data_are_frames_like_any_other() -> None:
    stream = encode.publish("", [1, 2], [b"", b""]) + encode.attach("") + encode.detach("")
    assert list(server_decoder().feed(stream)) == [PublishBatch("", [1, 2], [b"", b""]), Attach("", None), Detach("")]


def test_the_largest_numbers_survive() -> None:
    top = (1 << 64) - 1
    assert list(server_decoder().feed(encode.publish("t", [top], [b"x"]) + encode.ping(top))) == [
        PublishBatch("t", [top], [b"x"]),
        Ping(top),
    ]
    assert list(client_decoder().feed(encode.data("t", [top], [b"x"]) + encode.acks([0, top]))) == [
        DataBatch("t", [top], [b"x"]),
        AckBatch([0, top]),
    ]


def test_topic_names_are_utf_8() -> None:
    assert list(server_decoder().feed(encode.detach("пример"))) == [Detach("пример")]
