from __future__ import annotations

import asyncio
import struct

import pytest

from headrace.limits import BLIPMQ_BAD_KEYS_MAX, BLIPMQ_LOGIN_FRAME_BYTES_MAX
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.wire.blipmq import AckBatch, FrameType, Nack, Pong, encoder
from tests.sessions.blipmq.support import KEYS, running_server


def frame(kind: FrameType, cid: int, payload: bytes) -> bytes:
    return struct.pack(">IBQ", 9 + len(payload), kind, cid) + payload


async def test_hello_then_auth_are_each_acknowledged_with_subscription_zero() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        assert await peer.exchange(encoder.hello(1)) == [AckBatch(0, [1])]
        peer.session.receive(encoder.auth(2, b"dev-key"))
        assert peer.heard() == [AckBatch(0, [2])]
        assert await peer.exchange(b"") == []


async def test_the_handshake_works_byte_by_byte_and_in_one_write_with_what_follows() -> None:
    async with running_server() as broker:
        stream = encoder.hello(1) + encoder.auth(2, b"dev-key") + encoder.ping(3)
        slow, fast = broker.connect(), broker.connect()
        for at in range(len(stream)):
            slow.session.receive(stream[at : at + 1])
        fast.session.receive(stream)
        assert slow.wire.sent == fast.wire.sent == encoder.acks(0, [1, 2]) + encoder.pong(3)
        assert fast.wire.sends == 1


@pytest.mark.parametrize(
    "raw",
    [
        encoder.ping(7),
        encoder.publishes(1, "demo", [7], [b"v"]),
        encoder.subscribe(7, "demo", 1),
        encoder.polls(1, [7]),
        encoder.acks(1, [7]),
        encoder.nack(7, 400, "mine"),
        encoder.pong(7),
        frame(FrameType.POLL, 7, b"short"),
        frame(FrameType.PUBLISH, 7, b""),
    ],
)
@pytest.mark.parametrize("greeted", [False, True])
async def test_whatever_comes_before_auth_is_unauthenticated(raw: bytes, greeted: bool) -> None:
    async with running_server() as broker:
        peer = broker.connect()
        if greeted:
            await peer.exchange(encoder.hello(1))
        assert await peer.exchange(raw) == [Nack(7, 401, "unauthenticated")]
        assert broker.broker.topics(KEYS[b"dev-key"]) == []


async def test_every_record_of_a_batch_before_auth_is_refused() -> None:
    async with running_server() as broker:
        replies = await broker.connect().exchange(encoder.publishes(1, "demo", [1, 2, 3], [b"a", b"b", b"c"]))
        assert replies == [Nack(cid, 401, "unauthenticated") for cid in (1, 2, 3)]


@pytest.mark.parametrize("payload", [b"", b"\1", b"\0\1\0"])
async def test_a_hello_that_is_not_two_bytes_is_invalid(payload: bytes) -> None:
    async with running_server() as broker:
        assert await broker.connect().exchange(frame(FrameType.HELLO, 5, payload)) == [Nack(5, 400, "invalid HELLO payload")]


async def test_another_version_is_refused_and_hello_may_be_tried_again() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        assert await peer.exchange(encoder.hello(1, version=2)) == [Nack(1, 426, "unsupported protocol version")]
        assert await peer.exchange(encoder.hello(2)) == [AckBatch(0, [2])]


async def test_a_second_hello_is_refused_before_and_after_auth() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        assert await peer.exchange(encoder.hello(1) + encoder.hello(2)) == [AckBatch(0, [1]), Nack(2, 400, "HELLO already performed")]
        assert await peer.exchange(encoder.auth(3, b"dev-key") + encoder.hello(4)) == [
            AckBatch(0, [3]),
            Nack(4, 400, "HELLO already performed"),
        ]


async def test_auth_before_hello_is_refused_whatever_its_payload() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        replies = await peer.exchange(encoder.auth(1, b"dev-key") + frame(FrameType.AUTH, 2, b"\0"))
        assert replies == [Nack(1, 400, "HELLO not performed"), Nack(2, 400, "HELLO not performed")]


async def test_auth_after_auth_is_refused_whatever_its_payload() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        replies = await peer.exchange(encoder.auth(1, b"dev-key") + encoder.auth(2, b"wrong") + frame(FrameType.AUTH, 3, b"\0"))
        assert replies == [Nack(cid, 400, "already authenticated") for cid in (1, 2, 3)]


@pytest.mark.parametrize("payload", [b"", b"\0", b"\0\5abc", b"\0\1abc", b"\0\1\xff"])
async def test_an_auth_that_cannot_be_read_is_invalid(payload: bytes) -> None:
    async with running_server() as broker:
        replies = await broker.connect().exchange(encoder.hello(1) + frame(FrameType.AUTH, 2, payload))
        assert replies == [AckBatch(0, [1]), Nack(2, 400, "invalid AUTH payload")]


async def test_a_wrong_key_is_refused_and_another_may_be_tried() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        replies = await peer.exchange(encoder.hello(1) + encoder.auth(2, b"wrong") + encoder.auth(3, b""))
        assert replies == [AckBatch(0, [1]), Nack(2, 401, "invalid API key"), Nack(3, 401, "invalid API key")]
        peer.session.receive(encoder.auth(4, b"dev-key"))
        assert peer.heard() == [AckBatch(0, [4])]


async def test_the_fifth_wrong_key_is_answered_and_closes_the_connection() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        peer.session.receive(encoder.hello(1) + b"".join(encoder.auth(cid, b"wrong") for cid in range(2, 1 + BLIPMQ_BAD_KEYS_MAX)))
        assert peer.wire.closed is None
        peer.session.receive(encoder.auth(9, b"wrong") + encoder.auth(10, b"dev-key"))
        assert peer.heard()[-1] == Nack(9, 401, "invalid API key")
        assert peer.wire.closed == ("too many bad keys: 5", True)


async def test_a_frame_longer_than_any_key_closes_a_connection_that_is_not_logged_in() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        peer.session.receive(struct.pack(">I", BLIPMQ_LOGIN_FRAME_BYTES_MAX))
        assert peer.wire.closed is None
        peer = broker.connect()
        peer.session.receive(struct.pack(">I", BLIPMQ_LOGIN_FRAME_BYTES_MAX + 1))
        assert peer.wire.closed == ("bad frame: frame length 65547 is outside [9, 65546]", True)


async def test_after_auth_a_large_frame_may_follow_in_the_same_read() -> None:
    async with running_server() as broker:
        peer = broker.connect()
        value = bytes(1 << 20)
        large = encoder.publishes(1, "demo", [3], [value])
        assert await peer.exchange(encoder.hello(1) + encoder.auth(2, b"dev-key") + large) == [AckBatch(0, [1, 2])]
        assert broker.values("demo") == [value]


@pytest.mark.parametrize(
    "raw", [struct.pack(">I", 0), struct.pack(">I", 8), struct.pack(">I", 0xFFFFFFFF), struct.pack(">IBQ", 9, 0x0A, 1)]
)
async def test_bytes_that_are_no_frame_close_the_connection_without_a_nack(raw: bytes) -> None:
    async with running_server() as broker:
        peer = await broker.client()
        before = len(peer.wire.sent)
        peer.session.receive(raw)
        assert peer.wire.closed is not None and peer.wire.closed[0].startswith("bad frame: ")
        assert len(peer.wire.sent) == before
        peer.session.receive(encoder.ping(1))
        assert len(peer.wire.sent) == before


async def test_what_came_before_a_bad_frame_is_still_answered() -> None:
    async with running_server() as broker:
        peer = await broker.client()
        peer.session.receive(encoder.publishes(1, "new-topic", [1], [b"kept"]) + encoder.ping(2) + b"\0\0\0\0")
        assert (await peer.closed())[0].startswith("bad frame: frame length 0")
        assert peer.heard()[-1:] == [Pong(2)]
        assert broker.values("new-topic") == [b"kept"]


async def test_a_connection_that_does_not_log_in_in_time_is_closed() -> None:
    async with running_server(BlipMqSettings(login_seconds=0.01)) as broker:
        late, in_time = broker.connect(), broker.connect()
        late.session.receive(encoder.hello(1))
        in_time.session.receive(encoder.hello(1) + encoder.auth(2, b"dev-key"))
        assert await late.closed() == ("no login in time: 0.01 seconds", True)
        await asyncio.sleep(0)
        assert in_time.wire.closed is None
