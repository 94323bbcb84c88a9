from __future__ import annotations

import struct
from collections.abc import Callable

import pytest

from headrace.wire import figg, flymq
from headrace.wire.blipmq import encoder, sniff
from headrace.wire.rustlog import sniff as rustlog_sniff
from headrace.wire.sniff import Sniff
from tests.wire.blipmq.golden import GOLDEN


def counted(name: str) -> bytes:
    return struct.pack(">H", len(name)) + name.encode()


def rustlog(kind: int, body: bytes = b"") -> bytes:
    return struct.pack(">IB", 1 + len(body), kind) + body


def test_a_hello_of_any_version_and_id_is_certain_after_five_bytes() -> None:
    for raw in (encoder.hello(1), encoder.hello((1 << 64) - 1), encoder.hello(7, version=2)):
        assert [sniff(raw[:cut]) for cut in range(len(raw) + 1)] == [Sniff.MORE] * 5 + [Sniff.YES] * (len(raw) - 4)


FIRST_WITHOUT_HELLO = [
    GOLDEN["auth"][0],
    GOLDEN["publish"][0],
    GOLDEN["subscribe"][0],
    GOLDEN["ack"][0],
    encoder.polls(1, [9]),
    encoder.ping(5),
    encoder.auth(2, b"ten-bytes!"),
    encoder.publishes(0, "orders", [4], [bytes(70_000)]),
]


@pytest.mark.parametrize("raw", FIRST_WITHOUT_HELLO)
def test_a_frame_before_hello_is_recognised_when_it_parses_exactly(raw: bytes) -> None:
    answers = [sniff(raw[:cut]) for cut in range(min(len(raw), 16) + 1)]
    assert answers[-1] is Sniff.YES
    assert Sniff.NO not in answers


RUSTLOG = [
    rustlog(0xFF),
    rustlog(0x06),
    rustlog(0x09),
    rustlog(0x01, counted("orders") + struct.pack(">III", 0, 1, 2) + b"hi"),
    rustlog(0x01, counted("t") + struct.pack(">II", 0, 0)),
    rustlog(0x02, counted("") + counted("orders") + struct.pack(">IQI", 0, 0, 1024)),
    rustlog(0x02, counted("") + counted("demo") + struct.pack(">IQI", 0, 0, 1024)),
    rustlog(0x02, counted("g1") + counted("t1") + struct.pack(">IQI", 0, 0, 1024)),
    rustlog(0x03, counted("g1") + counted("t1") + struct.pack(">IQ", 0, 42)),
    rustlog(0x03, counted("g") + counted("t1") + struct.pack(">IQ", 1, 42)),
    rustlog(0x04, counted("group1") + counted("orders") + struct.pack(">I", 0)),
    rustlog(0x05, counted("t") + struct.pack(">I", 2)),
    rustlog(0x05, counted("0123456789") + struct.pack(">I", 2)),  # as long as an ACK
    rustlog(0x07, counted("orders")),  # as long as a PING
    rustlog(0x08, counted("orders") + struct.pack(">I", 0)),
]


@pytest.mark.parametrize("raw", RUSTLOG)
def test_requests_of_rustlogs_binary_dialect_are_not_taken_for_blipmq(raw: bytes) -> None:
    assert sniff(raw) is Sniff.NO


@pytest.mark.parametrize(
    "raw",
    [
        b"\xaf\x01\x01\x00\x00\x00\x00\x00",
        b'\x00\x00\x00\x48{"Produce":{"topic"',
        bytes.fromhex("0001 0001 00000011 0000 00000003 666f6f 0000000000000000"),
        bytes.fromhex("0005 0001 00000016 00000003 666f6f 0000000000000000 00000003 626172"),
        bytes.fromhex("0008 0001 00000008 0000000000003039"),
        b"GET / HTTP/1.1\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        struct.pack(">IBQ", 9, 0x0A, 1),
        struct.pack(">IBQ", 8, 0x01, 1),
        encoder.publishes(7, "demo", [1], [b"v"]),
        encoder.publishes(1, "", [1], [b"v"]),
        encoder.subscribe(1, "", 1),
        encoder.ping(1 << 32),
    ],
)
def test_other_protocols_and_inexact_frames_are_refused(raw: bytes) -> None:
    assert sniff(raw) is Sniff.NO


@pytest.mark.parametrize("raw", [encoder.hello(1), encoder.hello((1 << 64) - 1), encoder.hello(7, version=2), *FIRST_WITHOUT_HELLO])
@pytest.mark.parametrize("other", [figg.sniff, flymq.sniff, rustlog_sniff], ids=["figg", "flymq", "rustlog"])
def test_no_other_protocol_of_a_shared_port_claims_a_blipmq_client(raw: bytes, other: Callable[[bytes], Sniff]) -> None:
    assert Sniff.YES not in [other(raw[:cut]) for cut in range(1, len(raw[:300]) + 1)]
