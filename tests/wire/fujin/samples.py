"""Bytes of the specification and of the original implementation, with what they mean."""

from __future__ import annotations

from headrace.wire.fujin import (
    ClientMessage,
    ConnectReader,
    ConnectWriter,
    Disconnect,
    Disconnected,
    Failed,
    Fetch,
    Fetched,
    MessageBatch,
    ReaderConnected,
    ReaderKind,
    Reply,
    Request,
    ServerMessage,
    Settle,
    Settled,
    Stop,
    Transact,
    Transacted,
    WriteBatch,
    WrittenBatch,
)


def wire(*numbers: int) -> bytes:
    return bytes(numbers)


ONE = b"\x00\x00\x00\x01"
WRITER = wire(1, 0, 0, 0, 0)
READER = wire(2, 1, 0, 0, 0, 0, 3, 112, 117, 98)
PULLER = wire(2, 2, 0, 0, 0, 0, 3, 112, 117, 98)
WRITE = wire(3, 0, 1, 1, 1, 0, 0, 0, 3, 112, 117, 98, 0, 0, 0, 5, 104, 101, 108, 108, 111)
WRITE_CID = wire(0, 1, 1, 1)

REQUESTS: dict[str, tuple[bytes, list[ClientMessage]]] = {
    "CONNECT WRITER without an id": (WRITER, [ConnectWriter(None)]),
    "CONNECT WRITER with a number": (wire(1, 0, 0, 0, 1, 10), [ConnectWriter(1), Disconnect()]),
    "CONNECT WRITER with a text": (wire(1, 0, 0, 0, 2) + b"me" + wire(10), [ConnectWriter(b"me"), Disconnect()]),
    "WRITE": (WRITER + WRITE, [ConnectWriter(None), WriteBatch("pub", [WRITE_CID], [b"hello"])]),
    "BEGIN TX": (WRITER + wire(4, 0, 0, 0, 1), [ConnectWriter(None), Transact(Request.BEGIN, ONE)]),
    "COMMIT TX": (WRITER + wire(5, 0, 0, 0, 1), [ConnectWriter(None), Transact(Request.COMMIT, ONE)]),
    "ROLLBACK TX": (WRITER + wire(6, 0, 0, 0, 1), [ConnectWriter(None), Transact(Request.ROLLBACK, ONE)]),
    "CONNECT READER": (READER, [ConnectReader(ReaderKind.PUSH, False, "pub")]),
    "FETCH": (PULLER + wire(7, 0, 0, 0, 1, 0, 0, 0, 1), [ConnectReader(ReaderKind.PULL, False, "pub"), Fetch(ONE, 1)]),
    "ACK": (
        READER + wire(8, 0, 0, 0, 1, 0, 0, 0, 2, 0, 0, 0, 1, 49, 0, 0, 0, 2, 50, 51),
        [ConnectReader(ReaderKind.PUSH, False, "pub"), Settle(Request.ACK, ONE, [b"1", b"23"])],
    ),
    "NACK of nothing": (
        READER + wire(9, 0, 0, 0, 1, 0, 0, 0, 0),
        [ConnectReader(ReaderKind.PUSH, False, "pub"), Settle(Request.NACK, ONE, [])],
    ),
    "DISCONNECT": (READER + wire(10), [ConnectReader(ReaderKind.PUSH, False, "pub"), Disconnect()]),
}

REPLIES: dict[str, tuple[bytes, bool, list[ServerMessage]]] = {
    "CONNECT READER": (wire(1, 0), False, [ReaderConnected(None)]),
    "CONNECT READER refused": (wire(1, 1, 0, 0, 0, 2) + b"no", False, [ReaderConnected("no")]),
    "WRITE": (wire(2, 0, 1, 1, 1, 0), False, [WrittenBatch([WRITE_CID])]),
    "WRITE refused": (wire(2, 0, 0, 0, 1, 1, 0, 0, 0, 2) + b"no", False, [Failed(Reply.WRITE, ONE, "no")]),
    "BEGIN TX": (wire(3, 0, 0, 0, 1, 0), False, [Transacted(Reply.BEGIN, ONE)]),
    "COMMIT TX": (wire(4, 0, 0, 0, 1, 0), False, [Transacted(Reply.COMMIT, ONE)]),
    "ROLLBACK TX": (wire(5, 0, 0, 0, 1, 0), False, [Transacted(Reply.ROLLBACK, ONE)]),
    "MSG with auto commit": (wire(6, 0, 0, 0, 5) + b"hello", False, [MessageBatch(None, [b"hello"])]),
    "MSG with an id": (wire(6, 0, 0, 0, 1, 49, 0, 0, 0, 5) + b"hello", True, [MessageBatch([b"1"], [b"hello"])]),
    "FETCH": (
        wire(7, 0, 0, 0, 1, 0, 0, 0, 0, 2) + 2 * (wire(0, 0, 0, 5) + b"hello"),
        False,
        [Fetched(ONE, None, [b"hello", b"hello"])],
    ),
    "FETCH of nothing, the specification's second example": (wire(7, 0, 0, 0, 1, 0, 0, 0, 0, 0), False, [Fetched(ONE, None, [])]),
    "FETCH refused": (
        wire(7, 0, 0, 0, 1, 1, 0, 0, 0, 13) + b"not supported",
        False,
        [Failed(Reply.FETCH, ONE, "not supported")],
    ),
    "ACK of two, one of them bad": (
        wire(8, 0, 0, 0, 1, 0, 0, 0, 0, 2, 0, 0, 0, 8) + b"12345678" + wire(0, 0, 0, 0, 1, 49, 1, 0, 0, 0, 6) + b"bad id",
        True,
        [Settled(Reply.ACK, ONE, [b"12345678", b"1"], [None, "bad id"])],
    ),
    "NACK of nothing": (wire(9, 0, 0, 0, 1, 0, 0, 0, 0, 0), True, [Settled(Reply.NACK, ONE, [], [])]),
    "DISCONNECT": (wire(10), False, [Disconnected()]),
    "STOP": (wire(12), False, [Stop()]),
}
