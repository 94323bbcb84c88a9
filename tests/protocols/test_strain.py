"""Hostile peers on every protocol: memory stays bounded, other peers are served, and the broker counts what it rejected."""

from __future__ import annotations

import socket
import struct
import threading
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from headrace.limits import MIB
from headrace.server import certificates
from headrace.wire import blipmq, figg, flymq, rustlog
from headrace.wire.flymq import messages as flymq_messages
from headrace.wire.rustlog import Dialect
from headrace.wire.rustlog import messages as rustlog_messages
from tests.protocols.strain import PROTOCOLS, TOPIC, Peer, strained, until

HISTORY_BYTES = 48 * MIB
RECORD_BYTES = 256 * 1024


def publish_history(address: tuple[str, int]) -> None:
    count = HISTORY_BYTES // RECORD_BYTES
    with Peer(address, "figg").greet() as peer:
        peer.socket.sendall(figg.encode.publish(TOPIC, range(1, count + 1), [bytes(RECORD_BYTES)] * count))
        decoder, last = figg.client_decoder(), 0
        while last < count:
            for message in decoder.feed(peer.socket.recv(65_536)):
                assert isinstance(message, figg.AckBatch)
                last = message.seqs[-1]


def subscription(peer: Peer) -> int:
    peer.socket.sendall(blipmq.encoder.subscribe(9, TOPIC, 1))
    decoder = blipmq.Decoder()
    while True:
        for answer in decoder.feed(peer.socket.recv(65_536)):
            assert isinstance(answer, blipmq.AckBatch)
            return answer.subscription


def requests_for_everything(protocol: str, peer: Peer) -> bytes:
    """Requests with replies far larger than memory: gigabytes, or everything, for each of ten peers."""
    match protocol:
        case "figg":
            return figg.encode.attach(TOPIC, 0)
        case "rustlog":
            return 500 * rustlog.encode_request(Dialect.BINARY, rustlog_messages.Fetch(TOPIC, 0, 1, 4 * MIB))
        case "flymq":
            return 500 * flymq.encode_request(flymq_messages.Fetch(TOPIC, 0, 1, 16))
        case _:
            return blipmq.encoder.polls(subscription(peer), range(10, 10 + HISTORY_BYTES // RECORD_BYTES))


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_readers_that_take_a_byte_at_a_time_are_not_fed_more(tmp_path: Path, protocol: str) -> None:
    with strained(tmp_path, grown_bytes_max=HISTORY_BYTES + 10 * 12 * MIB) as strain:
        readers = [Peer(strain.address, protocol, receive_bytes=4_096).greet() for _ in range(10)]
        requests = [requests_for_everything(protocol, reader) for reader in readers]
        publish_history(strain.address)
        for reader, request in zip(readers, requests, strict=True):
            reader.socket.sendall(request)
        # Long enough for a broker without bounds to have read hundreds of megabytes for them.
        over = time.monotonic() + 2.0
        while time.monotonic() < over:
            for reader in readers:
                assert len(reader.socket.recv(1)) == 1
            time.sleep(0.1)
        with Peer(strain.address, protocol).greet() as newcomer:
            newcomer.exchange()
        for reader in readers:
            reader.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_writers_that_flood_and_never_read_wait_for_the_disk(tmp_path: Path, protocol: str) -> None:
    with strained(tmp_path, "limits.in_flight=256 KiB", "limits.output_buffer=64 KiB", grown_bytes_max=96 * MIB) as strain:
        writers = [Peer(strain.address, protocol, receive_bytes=4_096).greet() for _ in range(4)]
        taken: list[int] = []
        floods = [threading.Thread(target=lambda peer=peer: taken.append(peer.pour(peer.frames.publish, 1.5))) for peer in writers]
        for flood in floods:
            flood.start()
        for flood in floods:
            flood.join()
        for writer in writers:
            writer.close()
    assert len(taken) == 4 and min(taken) > 0
    assert strain.counted("reading_pauses") > 0


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_a_peer_that_ends_its_half_gets_its_answer_and_is_let_go(tmp_path: Path, protocol: str) -> None:
    with strained(tmp_path, grown_bytes_max=32 * MIB) as strain:
        peers = [Peer(strain.address, protocol) for _ in range(50)]
        for peer in peers:
            peer.socket.sendall(peer.frames.greeting + peer.frames.publish + peer.frames.question)
            peer.socket.shutdown(socket.SHUT_WR)
        for peer in peers:
            received = b""
            while data := peer.socket.recv(65_536):
                received += data
            assert received
            peer.close()


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_peers_that_vanish_in_the_middle_of_a_frame_leave_nothing_behind(tmp_path: Path, protocol: str) -> None:
    with strained(tmp_path, grown_bytes_max=64 * MIB) as strain:
        for _ in range(100):
            with Peer(strain.address, protocol) as peer:
                peer.socket.sendall(peer.frames.greeting + peer.frames.publish[:700])
                # Closed with a reset, as by a machine that has lost its memory of the connection.
                peer.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        until(lambda: open_files(strain.broker.process.pid) < 60)


def open_files(pid: int) -> int:
    return sum(1 for _ in Path(f"/proc/{pid}/fd").iterdir())


def test_a_thousand_idle_connections_cost_little_and_stay(tmp_path: Path) -> None:
    with strained(tmp_path, "limits.handshake_timeout=1s", "limits.frame_timeout=500ms", grown_bytes_max=64 * MIB) as strain:
        idle = [Peer(strain.address, protocol).greet() for protocol in PROTOCOLS for _ in range(250)]
        over = time.monotonic() + 2.0
        until(lambda: time.monotonic() > over)
        # Longer than every deadline for those who have not said who they are.
        assert not any(peer.is_closed() for peer in idle)
        for peer in idle:
            peer.exchange()
            peer.close()
    assert strain.counted("accepted") > 1_000


def test_a_thousand_silent_connections_are_closed_at_the_deadline(tmp_path: Path) -> None:
    with strained(tmp_path, "limits.handshake_timeout=500ms", grown_bytes_max=64 * MIB) as strain:
        silent = [Peer(strain.address, "figg") for _ in range(1_000)]
        until(lambda: all(peer.is_closed() for peer in silent))
        for peer in silent:
            peer.close()
    assert strain.counted("no first message in time") == 1_000


@pytest.mark.parametrize("protocol", PROTOCOLS)
def test_peers_that_send_their_first_frame_byte_by_byte_are_closed(tmp_path: Path, protocol: str) -> None:
    with strained(tmp_path, "limits.handshake_timeout=1s", "limits.frame_timeout=500ms", grown_bytes_max=32 * MIB) as strain:
        slow = [Peer(strain.address, protocol) for _ in range(100)]
        sent = 0
        over = time.monotonic() + 60.0
        closed: set[Peer] = set()
        while len(closed) < len(slow):
            assert time.monotonic() < over, f"{len(slow) - len(closed)} are still open"
            for peer in slow:
                if peer not in closed and (peer.is_closed() or not trickled(peer, sent)):
                    closed.add(peer)
            sent += 1
            time.sleep(0.02)
        for peer in slow:
            peer.close()
    assert strain.counted("frame too slow") + strain.counted("no login in time") + strain.counted("no first message in time") == 100


def trickled(peer: Peer, at: int) -> bool:
    """Send one more byte. Return False if the connection does not accept it."""
    try:
        return peer.socket.send(peer.frames.first_part[at : at + 1]) == 1
    except ConnectionError:
        return False


def test_handshakes_of_tls_that_are_never_finished_are_closed(tmp_path: Path) -> None:
    certificates.init(tmp_path / "certs", ["localhost"], datetime.now(UTC))
    tls = [f"tls.certificate={tmp_path / 'certs' / 'server.pem'}", f"tls.key={tmp_path / 'certs' / 'server.key'}", "tls.optional=true"]
    with strained(tmp_path, *tls, "limits.handshake_timeout=500ms", grown_bytes_max=64 * MIB) as strain:
        peers = [Peer(strain.address, "figg") for _ in range(500)]
        for peer in peers:
            peer.socket.sendall(bytes.fromhex("16 03 01 02 00 01 00 01 fc 03 03"))
        until(lambda: all(peer.is_closed() for peer in peers))
        for peer in peers:
            peer.close()
    assert strain.counted("no first message in time") == 500
    assert "TLS handshake not finished" in strain.log


@pytest.mark.parametrize("protocol", ["figg", "rustlog", "flymq"])
def test_large_frames_that_are_never_finished_have_a_bound_together(tmp_path: Path, protocol: str) -> None:
    with strained(tmp_path, "limits.unfinished_frames=48 MiB", grown_bytes_max=48 * MIB + 96 * MIB) as strain:
        holders = [Peer(strain.address, protocol) for _ in range(16)]
        pours = [threading.Thread(target=pour_once, args=(peer,)) for peer in holders]
        for pour in pours:
            pour.start()
        for pour in pours:
            pour.join()
        for peer in holders:
            peer.close()
    assert strain.counted("too many unfinished frames") > 0


def pour_once(peer: Peer) -> None:
    try:
        peer.socket.sendall(peer.frames.first_part)
    except OSError:
        pass  # rejected by the broker, as expected
