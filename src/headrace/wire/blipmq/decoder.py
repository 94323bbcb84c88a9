"""Decoder of BlipMQ messages for both roles.

Two paths decode the same frames. The slow path decodes one frame at a time. The fast path decodes `_BLOCK` frames at once: if the low byte
of the length repeats at equal distances, one `unpack_from` decodes the whole block, and the block is used only if every head and every
topic in it are equal. A failed attempt costs one comparison for each block. The fast path is about three times as fast.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from functools import lru_cache
from typing import Final

from headrace.errors import WireError
from headrace.limits import BLIPMQ_FRAME_BYTES_MAX
from headrace.wire.blipmq.frames import (
    ACK,
    COUNTED_HEAD_BYTES,
    GROUP_EARLIEST,
    GROUP_MODES,
    HEAD,
    HEAD_BYTES,
    LENGTH,
    NACK_HEAD,
    POLL,
    PUBLISH,
    SUBSCRIPTION_FRAME,
    TOPIC_HEAD,
    U16,
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

_BLOCK = 64
_SINGLES_FIRST = 8
"""Frames of a batch before a block is tried, so that alternating topics do not pay for blocks that never match."""
_SUBSCRIPTION_FRAME_BYTES: Final = 21
assert _SUBSCRIPTION_FRAME_BYTES == SUBSCRIPTION_FRAME.size == 21, "an ACK or POLL is 21 bytes"
_FEW_BYTES_MAX: Final = 32 * 21
"""POLLs and ACKs that are decoded one by one. More of them come in blocks."""


@lru_cache(maxsize=512)
def _block(prefix_bytes: int, value_bytes: int) -> struct.Struct:
    """`_BLOCK` frames of one size: (length and type, correlation id, common prefix, value) each."""
    return struct.Struct(">" + f"5sQ{prefix_bytes}s{value_bytes}s" * _BLOCK)


class Decoder:
    """Decoder of one direction. Yields every complete message.

    `frame_bytes_max` may change between two messages: a session allows large frames only after login. After a `WireError` the frame
    boundaries are unknown, and the decoder cannot be used.
    """

    __slots__ = ("_broken", "_held", "_held_bytes", "_wanted_bytes", "frame_bytes_max")

    def __init__(self, *, frame_bytes_max: int = BLIPMQ_FRAME_BYTES_MAX) -> None:
        self.frame_bytes_max = frame_bytes_max
        self._held: list[bytes] = []
        self._held_bytes = 0
        self._wanted_bytes = LENGTH.size
        self._broken: WireError | None = None

    @property
    def held_bytes(self) -> int:
        """Bytes received of an incomplete frame."""
        return self._held_bytes

    @property
    def held(self) -> bytes:
        return b"".join(self._held)

    def feed(self, data: bytes) -> Iterator[Message]:
        """Yield the messages completed by `data`, in order. Exhaust the iterator before the next call.

        Raises `WireError` after the last valid message if a length is out of bounds or a type is unknown.
        """
        if not self._held and self._broken is None and len(data) <= _FEW_BYTES_MAX and self.frame_bytes_max >= _SUBSCRIPTION_FRAME_BYTES:
            found = _polls_and_acks(data)
            if found is not None:
                return iter(found)
        return self._feed(data)

    def _feed(self, data: bytes) -> Iterator[Message]:
        if self._broken is not None:
            raise self._broken
        self._held.append(data)
        self._held_bytes += len(data)
        if self._held_bytes < self._wanted_bytes:
            # A large frame is joined once, when its last chunk is received.
            return
        buffer = data if len(self._held) == 1 else b"".join(self._held)
        position = 0
        try:
            while True:
                size = self._whole_frame(buffer, position)
                if not size:
                    break
                message, position = _message(buffer, position, size, self.frame_bytes_max)
                yield message
        except WireError as error:
            self._broken = error
            self._held, self._held_bytes = [], 0
            raise
        rest = buffer[position:]
        self._held, self._held_bytes = [rest] if rest else [], len(rest)

    def _whole_frame(self, buffer: bytes, position: int) -> int:
        """Return the size of the frame at `position`, or 0 if it is incomplete."""
        available = len(buffer) - position
        if available < LENGTH.size:
            self._wanted_bytes = LENGTH.size
            return 0
        (length,) = LENGTH.unpack_from(buffer, position)
        # Checked before anything is stored: a wrong length must not allocate memory.
        if not COUNTED_HEAD_BYTES <= length <= self.frame_bytes_max:
            raise WireError(f"frame length {length} is outside [{COUNTED_HEAD_BYTES}, {self.frame_bytes_max}]")
        size = LENGTH.size + int(length)
        if available < size:
            self._wanted_bytes = size
            return 0
        return size


def _polls_and_acks(data: bytes) -> list[Message] | None:
    """Decode a few POLLs and ACKs: clients send one at a time, with the ACK of the message before. None if there is anything else."""
    found: list[Message] = []
    if len(data) % _SUBSCRIPTION_FRAME_BYTES:
        return None
    for position in range(0, len(data), _SUBSCRIPTION_FRAME_BYTES):
        kind = data[position + 4]
        if kind != POLL and kind != ACK:
            return None
        length, _, cid, subscription = SUBSCRIPTION_FRAME.unpack_from(data, position)
        if length != _SUBSCRIPTION_FRAME_BYTES - 4:
            return None
        last = found[-1] if found else None
        if kind == POLL:
            if isinstance(last, PollBatch) and last.subscription == subscription:
                last.cids.append(cid)
            else:
                found.append(PollBatch(subscription, [cid]))
        elif isinstance(last, AckBatch) and last.subscription == subscription:
            last.cids.append(cid)
        else:
            found.append(AckBatch(subscription, [cid]))
    return found


def answer_bytes(received: bytes) -> int:
    """Return the size of the first frame in these bytes, 0 if it is incomplete. Raises `WireError` if it refuses a login."""
    if len(received) < HEAD_BYTES:
        return 0
    length, kind, _ = HEAD.unpack_from(received)
    if len(received) < LENGTH.size + length:
        return 0
    if kind != ACK:
        raise WireError("the login was refused")
    return LENGTH.size + int(length)


def _message(buffer: bytes, position: int, size: int, frame_bytes_max: int) -> tuple[Message, int]:
    """Return the message that starts at `position`, and the start of the next one."""
    _, kind, cid = HEAD.unpack_from(buffer, position)
    begin, end = position + HEAD_BYTES, position + size
    if kind == PUBLISH:
        return _publishes(buffer, position, end, cid, frame_bytes_max)
    if kind in (POLL, ACK):
        if size != _SUBSCRIPTION_FRAME_BYTES:
            return Malformed(FrameType(kind), cid), end
        length = size - LENGTH.size
        cids, _, end = _batch(buffer, position, kind, buffer[begin:end], length, length)
        (subscription,) = U64.unpack_from(buffer, begin)
        return (PollBatch if kind == POLL else AckBatch)(subscription, cids), end
    single = _SINGLES.get(kind)
    if single is None:
        raise WireError(f"unknown frame type 0x{kind:02x}")
    return single(cid, buffer[begin:end]) or Malformed(FrameType(kind), cid), end


def _publishes(buffer: bytes, position: int, end: int, cid: int, frame_bytes_max: int) -> tuple[Message, int]:
    begin = position + HEAD_BYTES
    if end - begin < TOPIC_HEAD.size:
        return Malformed(FrameType.PUBLISH, cid), end
    qos, topic_bytes = TOPIC_HEAD.unpack_from(buffer, begin)
    value_begin = begin + TOPIC_HEAD.size + topic_bytes
    if value_begin > end:
        return Malformed(FrameType.PUBLISH, cid), end
    try:
        topic = buffer[begin + TOPIC_HEAD.size : value_begin].decode()
    except UnicodeDecodeError:
        return Malformed(FrameType.PUBLISH, cid), end
    # Equal bytes up to the value mean the same QoS and the same valid topic.
    prefix = buffer[begin:value_begin]
    cids, values, end = _batch(buffer, position, PUBLISH, prefix, COUNTED_HEAD_BYTES + len(prefix), frame_bytes_max)
    return PublishBatch(qos, topic, cids, values), end


def _batch(buffer: bytes, position: int, kind: int, prefix: bytes, length_min: int, length_max: int) -> tuple[list[int], list[bytes], int]:
    """Return the ids of adjacent complete frames of one type whose payloads start with `prefix`, the bytes after it, and their end."""
    cids: list[int] = []
    values: list[bytes] = []
    stop = len(buffer)
    head, prefix_bytes = HEAD.unpack_from, len(prefix)
    skip = HEAD_BYTES + prefix_bytes
    same = buffer.startswith
    last_whole = stop - HEAD_BYTES
    singles = _SINGLES_FIRST
    while position <= last_whole:
        length, this_kind, cid = head(buffer, position)
        following = position + 4 + length
        if this_kind != kind or not length_min <= length <= length_max or following > stop or not same(prefix, position + HEAD_BYTES):
            break
        if singles == 0:
            size = following - position
            taken = position + _BLOCK * size
            if taken <= stop and buffer[position + 3 : taken : size].count(buffer[position + 3]) == _BLOCK:
                columns = _block(prefix_bytes, size - skip).unpack_from(buffer, position)
                if columns[::4].count(columns[0]) == _BLOCK and columns[2::4].count(prefix) == _BLOCK:
                    cids += columns[1::4]
                    values += columns[3::4]
                    position = taken
                    continue
            # No block starts here. Try again after as many frames as a block has.
            singles = _BLOCK
        singles -= 1
        cids.append(cid)
        values.append(buffer[position + skip : following])
        position = following
    return cids, values, position


def _hello(cid: int, payload: bytes) -> Message | None:
    return Hello(cid, U16.unpack(payload)[0]) if len(payload) == U16.size else None


def _auth(cid: int, payload: bytes) -> Message | None:
    if len(payload) < U16.size or U16.unpack_from(payload)[0] != len(payload) - U16.size:
        return None
    key = payload[U16.size :]
    return Auth(cid, key) if _text(key) is not None else None


def _subscribe(cid: int, payload: bytes) -> Message | None:
    if len(payload) < U16.size:
        return None
    end = U16.size + U16.unpack_from(payload)[0]
    if end >= len(payload):
        return None
    topic = _text(payload[U16.size : end])
    if topic is None:
        return None
    group, options = _group(payload[end + 1 :])
    return Subscribe(cid, topic, payload[end], group, GROUP_MODES[options % GROUP_EARLIEST], options >= GROUP_EARLIEST)


def _group(rest: bytes) -> tuple[str, int]:
    """Return group and options. Bytes that are none of these are ignored: a client of the original may send any."""
    if len(rest) > U16.size and len(rest) == U16.size + U16.unpack_from(rest)[0] + 1:
        group, options = _text(rest[U16.size : -1]), rest[-1]
        if group and options % GROUP_EARLIEST < len(GROUP_MODES) and options < 2 * GROUP_EARLIEST:
            return group, options
    return "", 0


def _nack(cid: int, payload: bytes) -> Message | None:
    if len(payload) < NACK_HEAD.size:
        return None
    code, text_bytes = NACK_HEAD.unpack_from(payload)
    text = _text(payload[NACK_HEAD.size :])
    if text is None or text_bytes != len(payload) - NACK_HEAD.size:
        return None
    return Nack(cid, code, text)


def _text(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None


_SINGLES: dict[int, Callable[[int, bytes], Message | None]] = {
    FrameType.HELLO: _hello,
    FrameType.AUTH: _auth,
    FrameType.SUBSCRIBE: _subscribe,
    FrameType.NACK: _nack,
    FrameType.PING: lambda cid, _: Ping(cid),
    FrameType.PONG: lambda cid, _: Pong(cid),
}
