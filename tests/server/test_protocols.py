"""Four protocols on one port, detected by the first bytes."""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from headrace.broker.broker import Broker
from headrace.engine.memory import MemoryEngine
from headrace.net.protocol import ServedProtocol, Sniff, choose
from headrace.server.config import TCP_PROTOCOLS
from headrace.server.config_sources import resolve
from headrace.server.protocols import Protocols
from headrace.server.wiring import access_of
from headrace.wire import blipmq, figg, flymq, rustlog
from headrace.wire.blipmq import encoder
from headrace.wire.flymq import messages as flymq_messages
from headrace.wire.rustlog import Dialect
from headrace.wire.rustlog import messages as rustlog_messages
from tests.canaries import secret
from tests.server.process import BrokerProcess
from tests.server.test_api_keys import private
from tests.wire.flymq.samples import REQUESTS
from tests.wire.rustlog.vectors import REQUEST_FRAMES


def clock() -> int:
    return 0


def protocols() -> list[ServedProtocol]:
    engine = MemoryEngine(clock=clock)
    config = resolve().config
    access = access_of(config, engine, clock)
    return Protocols(Broker(engine, clock=clock), engine, config, access, clock=clock, blipmq_keys={}).named(())


PROTOCOLS = protocols()
SNIFFERS = {"flymq": flymq.sniff, "rustlog": rustlog.sniff, "blipmq": blipmq.sniff, "figg": figg.sniff}


def first_frames() -> Iterator[tuple[str, bytes]]:
    for topic in ("t", "demo", "a" * 249):
        for frame in (
            figg.encode.ping(0),
            figg.encode.ping((1 << 64) - 1),
            figg.encode.attach(topic),
            figg.encode.attach(topic, 7),
            figg.encode.detach(topic),
            figg.encode.publish(topic, [0], [b"hi"]),
            figg.encode.publish(topic, [0], [bytes(100_000)]),
        ):
            yield "figg", frame
        for cid in (0, 1, 4, 255, 65_536, (1 << 32) - 1):
            for frame in (
                encoder.hello(cid),
                encoder.auth(cid, b"dev-key"),
                encoder.publishes(1, topic, [cid], [b"hi"]),
                encoder.subscribe(cid, topic, 1),
                encoder.ack(cid, 1),
                encoder.ping(cid),
                encoder.polls(1, [cid]),
            ):
                yield "blipmq", frame
    yield "blipmq", encoder.hello((1 << 64) - 1)
    for _, frame, _ in REQUEST_FRAMES:
        yield "rustlog", frame
    for dialect in Dialect:
        yield "rustlog", rustlog.encode_request(dialect, rustlog_messages.Produce("demo", 0, [bytes(1_000)] * 500))
    for request in REQUESTS:
        yield "flymq", flymq.encode_request(request)


FIRST_FRAMES = list(first_frames())


def test_the_protocols_are_those_the_configuration_names() -> None:
    assert tuple(protocol.name for protocol in PROTOCOLS) == TCP_PROTOCOLS == tuple(SNIFFERS)


@pytest.mark.parametrize("name", TCP_PROTOCOLS)
def test_a_first_frame_cut_anywhere_comes_to_its_own_protocol(name: str) -> None:
    frames = [frame for owner, frame in FIRST_FRAMES if owner == name]
    assert len(frames) > 10
    for frame in frames:
        # Detection ends at 256 bytes.
        answers = [choose(PROTOCOLS, frame[:cut]) for cut in range(1, min(len(frame), 256) + 1)]
        names = [answer.name if isinstance(answer, ServedProtocol) else answer for answer in answers]
        assert names[-1] == name, frame[:32].hex()
        at = names.index(name)
        assert set(names[:at]) <= {Sniff.MORE} and set(names[at:]) == {name}, frame[:32].hex()


@settings(max_examples=3_000)
@given(
    st.one_of(
        st.binary(min_size=1, max_size=80),
        st.builds(
            lambda length, kind, rest: struct.pack(">IB", length, kind) + rest,
            st.integers(0, 64),
            st.integers(0, 12),
            st.binary(max_size=64),
        ),
        st.sampled_from([frame[:300] for _, frame in FIRST_FRAMES]),
    )
)
@example(b"\x16\x03\x01")
def test_no_bytes_are_taken_by_two_protocols(first: bytes) -> None:
    taken = [name for name, sniff in SNIFFERS.items() if sniff(first) is Sniff.YES]
    assert len(taken) <= 1


def test_no_protocol_takes_what_begins_like_tls() -> None:
    # That byte selects TLS before any protocol is detected.
    assert choose(PROTOCOLS, b"\x16\x03\x01\x00\xc8") is Sniff.NO
    assert not any(frame.startswith(b"\x16") for _, frame in FIRST_FRAMES)


@pytest.mark.parametrize("text", [b"GET / HTTP/1.1\r\n\r\n", b"SSH-2.0-OpenSSH\r\n", b"\x00" * 64, b"\xff" * 64])
def test_bytes_of_no_protocol_are_rejected_by_all(text: bytes) -> None:
    assert choose(PROTOCOLS, text) is Sniff.NO


KEY = secret("api-key")
FIGG_PING = figg.encode.ping(7)
RUSTLOG_LIST = rustlog.encode_request(Dialect.BINARY, rustlog_messages.ListTopics())
FLYMQ_LIST = flymq.encode_request(flymq_messages.ListTopics())
BLIPMQ_PING = encoder.hello(1) + encoder.auth(2, KEY.encode()) + encoder.ping(3)
CONVERSATIONS = {
    "figg": (FIGG_PING, figg.encode.pong(7)),
    "rustlog": (RUSTLOG_LIST, b""),
    "flymq": (FLYMQ_LIST, bytes([0xAF, 0x01])),
    "blipmq": (BLIPMQ_PING, encoder.acks(0, [1, 2]) + encoder.pong(3)),
}


def answer(address: tuple[str, int], sent: bytes, size: int) -> bytes:
    """Return the first bytes of the reply; empty if the connection is closed."""
    with socket.create_connection(address, timeout=300) as peer:
        peer.sendall(sent)
        received = b""
        try:
            while len(received) < size and (data := peer.recv(4096)):
                received += data
        except ConnectionError:
            pass
        return received


def test_a_broker_serves_all_four_on_one_port_and_only_the_named_on_another(tmp_path: Path) -> None:
    key = private(tmp_path / "key", KEY)
    listens = ("--listen", "127.0.0.1:0", "--listen", "127.0.0.1:0=blipmq,figg", "--listen", "127.0.0.1:0=rustlog")
    with BrokerProcess(tmp_path, *listens, "--blipmq-key", f"file:{key}") as broker:
        all_protocols, two, one = broker.addresses
        for name, (sent, wanted) in CONVERSATIONS.items():
            assert answer(all_protocols, sent, len(wanted) or 1).startswith(wanted), name
        for name in ("figg", "blipmq"):
            sent, wanted = CONVERSATIONS[name]
            assert answer(two, sent, len(wanted)) == wanted
        for name in ("flymq", "rustlog"):
            assert answer(two, CONVERSATIONS[name][0], 1) == b"", name
        assert answer(one, CONVERSATIONS["rustlog"][0], 1) != b""
        # A listener with one protocol never guesses: what is no RustLog gets RustLog's own answer.
        assert b"error" in answer(one, CONVERSATIONS["flymq"][0], 64).lower()
        code, _, errors = broker.stop()
    assert code == 0
    assert errors.count("unknown protocol: first bytes") == 2
    assert "unknown protocol: 2" in errors, "and it is counted"


def test_a_frame_before_hello_gets_blipmqs_answer_on_the_shared_port(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        (nack,) = blipmq.Decoder().feed(answer(broker.addresses[0], encoder.ping(5), 15))
        assert isinstance(nack, blipmq.Nack)
        assert (nack.cid, nack.code) == (5, 401)


def test_bytes_of_no_protocol_and_silence_are_closed_within_the_deadline(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--set", "limits.handshake_timeout=200ms") as broker:
        (address,) = broker.addresses
        assert answer(address, b"GET / HTTP/1.1\r\n\r\n", 1) == b""
        assert answer(address, b"", 1) == b""
        assert answer(address, b"\0", 1) == b""
        _, _, errors = broker.stop()
    for reason in ("unknown protocol: first bytes 474554", "nothing at all", "nothing recognisable", "no first message in time: 2"):
        assert reason in errors
