"""Encoder of BlipMQ messages for both roles: columns in, one block of bytes out."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from functools import lru_cache
from typing import Literal

from headrace.errors import LimitExceeded, RecordTooLarge
from headrace.limits import BLIPMQ_FRAME_BYTES_MAX
from headrace.wire.blipmq.frames import (
    COUNTED_HEAD_BYTES,
    GROUP_EARLIEST,
    GROUP_MODES,
    HEAD,
    NACK_HEAD,
    PROTOCOL_VERSION,
    PUBLISH,
    SUBSCRIPTION_FRAME,
    TOPIC_HEAD,
    U16,
    U16_MAX,
    U64,
    AckBatch,
    Auth,
    FrameType,
    Hello,
    Malformed,
    Message,
    Nack,
    Ping,
    PollBatch,
    Pong,
    PublishBatch,
    Subscribe,
)

NACK_TEXT_BYTES_MAX = 1024
"""Maximum length of an error text. A longer one, such as a message of the operating system, is truncated."""


def hello(cid: int, version: int = PROTOCOL_VERSION) -> bytes:
    return _frame(FrameType.HELLO, cid, U16.pack(version))


def auth(cid: int, key: bytes) -> bytes:
    return _frame(FrameType.AUTH, cid, _counted(key, "API key"))


def subscribe(
    cid: int, topic: str, qos: int, group: str = "", mode: Literal["", "ordered", "shared"] = "", *, earliest: bool = False
) -> bytes:
    payload = b"%b%c" % (_counted(topic.encode(), "topic"), qos)
    if group:
        payload += b"%b%c" % (_counted(group.encode(), "group"), GROUP_MODES.index(mode) + (GROUP_EARLIEST if earliest else 0))
    return _frame(FrameType.SUBSCRIBE, cid, payload)


def ack(cid: int, subscription: int) -> bytes:
    return acks(subscription, (cid,))


def acks(subscription: int, cids: Iterable[int]) -> bytes:
    return _subscription_frames(FrameType.ACK, subscription, cids)


def polls(subscription: int, cids: Iterable[int]) -> bytes:
    return _subscription_frames(FrameType.POLL, subscription, cids)


def nack(cid: int, code: int, text: str) -> bytes:
    return nacks((cid,), code, text)


def nacks(cids: Iterable[int], code: int, text: str) -> bytes:
    """Return the same NACK for each of these requests."""
    raw = text.encode()
    if len(raw) > NACK_TEXT_BYTES_MAX:
        raw = raw[:NACK_TEXT_BYTES_MAX].decode(errors="ignore").encode()
    payload = NACK_HEAD.pack(code, len(raw)) + raw
    return b"".join([_frame(FrameType.NACK, cid, payload) for cid in cids])


def ping(cid: int) -> bytes:
    return _frame(FrameType.PING, cid)


def pong(cid: int) -> bytes:
    return _frame(FrameType.PONG, cid)


def publishes(qos: int, topic: str, cids: Iterable[int], values: Sequence[bytes]) -> bytes:
    """Return publishes or deliveries of one topic. Raises `RecordTooLarge` for a value that fits no frame, before anything is built."""
    prefix = _publish_prefix(qos, topic)
    value_bytes_max = BLIPMQ_FRAME_BYTES_MAX - COUNTED_HEAD_BYTES - len(prefix)
    largest = max(map(len, values), default=0)
    if largest > value_bytes_max:
        raise RecordTooLarge(size_bytes=largest, bytes_max=value_bytes_max)
    head, counted, kind = _publish_head(len(prefix)), COUNTED_HEAD_BYTES + len(prefix), FrameType.PUBLISH.value
    parts: list[bytes] = []
    add, pack = parts.append, head.pack
    for cid, value in zip(cids, values, strict=True):
        add(pack(counted + len(value), kind, cid, prefix))
        add(value)
    return b"".join(parts)


def publish(qos: int, topic: str, cid: int, value: bytes) -> bytes:
    """Return one publish or delivery, as `publishes` does."""
    prefix = _publish_prefix(qos, topic)
    counted = COUNTED_HEAD_BYTES + len(prefix) + len(value)
    if counted > BLIPMQ_FRAME_BYTES_MAX:
        raise RecordTooLarge(size_bytes=len(value), bytes_max=BLIPMQ_FRAME_BYTES_MAX - counted + len(value))
    return b"".join((HEAD.pack(counted, PUBLISH, cid), prefix, value))


def value_bytes_max(topic: str) -> int:
    """Return the size of the largest value that fits a PUBLISH of this topic."""
    return BLIPMQ_FRAME_BYTES_MAX - COUNTED_HEAD_BYTES - TOPIC_HEAD.size - len(topic.encode())


def encode(message: Message) -> bytes:
    """Encode any message. Slower than the functions above. A `Malformed` cannot be encoded."""
    match message:
        case Hello(cid, version):
            return hello(cid, version)
        case Auth(cid, key):
            return auth(cid, key)
        case PublishBatch(qos, topic, cids, values):
            return publishes(qos, topic, cids, values)
        case Subscribe(cid, topic, qos, group, mode, earliest):
            return subscribe(cid, topic, qos, group, mode, earliest=earliest)
        case AckBatch(subscription, cids):
            return acks(subscription, cids)
        case PollBatch(subscription, cids):
            return polls(subscription, cids)
        case Nack(cid, code, text):
            return nack(cid, code, text)
        case Ping(cid):
            return ping(cid)
        case Pong(cid):
            return pong(cid)
        case Malformed():
            raise ValueError("a malformed payload is not kept, so it cannot be encoded")


def _frame(kind: FrameType, cid: int, payload: bytes = b"") -> bytes:
    return HEAD.pack(COUNTED_HEAD_BYTES + len(payload), kind, cid) + payload


def _subscription_frames(kind: FrameType, subscription: int, cids: Iterable[int]) -> bytes:
    pack, length, kind_byte = SUBSCRIPTION_FRAME.pack, COUNTED_HEAD_BYTES + U64.size, kind.value
    return b"".join([pack(length, kind_byte, cid, subscription) for cid in cids])


def _counted(raw: bytes, what: str) -> bytes:
    if len(raw) > U16_MAX:
        raise LimitExceeded(f"{what} of {len(raw)} bytes exceeds the limit of {U16_MAX} bytes")
    return U16.pack(len(raw)) + raw


@lru_cache(maxsize=1024)
def _publish_prefix(qos: int, topic: str) -> bytes:
    return b"%c%b" % (qos, _counted(topic.encode(), "topic"))


@lru_cache(maxsize=1024)
def _publish_head(prefix_bytes: int) -> struct.Struct:
    return struct.Struct(f">IBQ{prefix_bytes}s")
