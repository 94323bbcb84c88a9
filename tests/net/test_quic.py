"""QUIC on loopback: streams, credit, pings, limits and closing, on both event loops."""

from __future__ import annotations

import asyncio
import dataclasses
import random
import socket
from functools import partial
from pathlib import Path

import pytest
from aioquic.quic.configuration import QuicConfiguration
from aioquic.quic.connection import QuicConnection

from headrace.limits import QUIC_UNPROVEN_MAX
from headrace.net.connection import NetLimits
from headrace.net.quic.connection import TURNS_AT_ONCE, CarrierTurns, NetworkAddress, Windows
from headrace.net.quic.endpoint import ClientEndpoint, ClientTls, Retry, ServerTls, fingerprint
from headrace.net.quic.listener import QuicLimits
from headrace.server.quic import self_signed
from tests.net.polling import until
from tests.net.quic_peer import ALPN, NOW, Client, quic_server
from tests.net.udp_proxy import UdpProxy

PROVING = QuicLimits(NetLimits(linger_seconds=0.5), retry=Retry.ALWAYS)
QUICK = QuicLimits(NetLimits(linger_seconds=0.5))


async def test_each_stream_a_client_opens_is_a_session_of_its_own(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        client = await server.client()
        one, two = client.say(b"one"), client.say(b"two")
        await until(lambda: client.said(one) == b"one" and client.said(two) == b"two")
        assert [bytes(session.heard) for session in server.sessions] == [b"one", b"two"]
        assert server.counters.open == 1 and server.counters.open_by_protocol == {"test": 2}


async def test_what_a_client_sends_before_it_finishes_is_answered_and_then_the_stream_ends(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        client = await server.client()
        stream = client.say(b"all", finish=True)
        await until(lambda: stream in client.ended)
        assert client.heard[stream] == b"all"
        await until(lambda: server.sessions[0].calls == ["finished", "lost"])
        assert server.counters.open_by_protocol == {"test": 0}


async def test_a_session_that_does_not_read_stops_its_peer_after_one_window(tmp_path: Path) -> None:
    limits = dataclasses.replace(QUICK, windows=Windows(stream_bytes=64 * 1024))
    async with quic_server(tmp_path, limits) as server:
        server.is_mute = True
        client = await server.client()
        stream = client.say(b"x")
        await until(lambda: len(server.sessions) == 1 and len(server.sessions[0].heard) == 1)
        session = server.sessions[0]
        session.link.pause_reading()
        flood = b"y" * 1_000_000
        client.carrier.send(stream, flood)
        await until(lambda: client.carrier.unacknowledged(stream) <= len(flood) - 60 * 1024)
        client.say(b"another stream goes on")
        await until(lambda: len(server.sessions) == 2 and bytes(server.sessions[1].heard) == b"another stream goes on")
        assert client.carrier.unacknowledged(stream) >= len(flood) - 64 * 1024, "no more credit than one window"
        assert bytes(session.heard) == b"x", "and nothing of it reaches a session that does not read"
        session.link.resume_reading()
        await until(lambda: len(session.heard) == 1 + len(flood))


async def test_all_streams_of_a_connection_share_its_window(tmp_path: Path) -> None:
    limits = dataclasses.replace(QUICK, windows=Windows(stream_bytes=64 * 1024, connection_bytes=128 * 1024))
    async with quic_server(tmp_path, limits) as server:
        server.is_mute = True
        client = await server.client()
        streams = [client.say(b"x") for _ in range(4)]
        await until(lambda: len(server.sessions) == 4)
        for session in server.sessions:
            session.link.pause_reading()
        for stream in streams:
            client.carrier.send(stream, b"y" * 100_000)
        await until(lambda: sum(map(client.carrier.unacknowledged, streams)) <= 400_000 - 120 * 1024)
        assert sum(map(client.carrier.unacknowledged, streams)) >= 400_000 - 129 * 1024
        for session in server.sessions:
            session.link.resume_reading()
        await until(lambda: all(len(session.heard) == 100_001 for session in server.sessions))


async def test_a_stream_given_up_gives_its_share_of_the_window_back(tmp_path: Path) -> None:
    limits = dataclasses.replace(QUICK, windows=Windows(stream_bytes=64 * 1024, connection_bytes=128 * 1024))
    async with quic_server(tmp_path, limits) as server:
        server.is_mute = True
        client = await server.client()
        for turn in range(6):
            stream = client.say(b"x")
            await until(lambda turn=turn: len(server.sessions) == turn + 1)  # type: ignore[misc]  # bound for this turn
            server.sessions[turn].link.pause_reading()
            client.carrier.send(stream, b"y" * 60_000)
            await until(lambda stream=stream: client.carrier.unacknowledged(stream) == 0)  # type: ignore[misc]
            client.carrier.abort(stream)
            await until(lambda turn=turn: "lost" in server.sessions[turn].calls)  # type: ignore[misc]


async def test_a_peer_that_does_not_read_is_known_by_what_waits_for_it(tmp_path: Path) -> None:
    net = NetLimits(output_high_water_bytes=64 * 1024, output_low_water_bytes=16 * 1024, output_bytes_max=256 * 1024)
    async with quic_server(tmp_path, QuicLimits(net)) as server:
        client = await server.client(windows=Windows(stream_bytes=64 * 1024))
        client.is_taking = False
        stream = client.say(b"x")
        await until(lambda: len(server.sessions) == 1)
        session = server.sessions[0]
        for _ in range(20):
            session.link.send(b"y" * 20_000)
        assert session.link.unsent_bytes > 256 * 1024
        await until(lambda: len(client.said(stream)) > 60_000)
        before = len(session.heard)
        client.carrier.send(stream, b"z")
        await until(lambda: client.carrier.unacknowledged(stream) == 0)
        assert len(session.heard) == before, "it is not read either"
        client.is_taking = True
        client.carrier.taken(stream, len(client.heard[stream]))
        await until(lambda: "drained" in session.calls and session.link.unsent_bytes == 0)
        await until(lambda: session.heard.endswith(b"z"))


async def test_a_client_that_answers_pings_stays_and_one_that_does_not_goes(tmp_path: Path) -> None:
    limits = dataclasses.replace(QUICK, ping_seconds=0.02, pong_seconds=1.0)
    async with quic_server(tmp_path, limits) as server:
        polite, silent = await server.client(), await server.client()
        silent.is_answering_pings = False
        silent.say(b"I am here")
        await until(lambda: silent.reason is not None)
        assert silent.reason is not None and silent.reason.startswith("code 3: read:")
        await until(lambda: polite.pings > 5)
        assert polite.reason is None
        await until(lambda: server.counters.open == 1)
        assert server.sessions[0].calls == ["lost"]


async def test_another_protocol_is_not_let_in(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        client = await server.client(alpn="another")
        assert client.reason is not None and server.sessions == []


async def test_one_connection_more_than_the_limit_is_rejected_with_a_reason(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QuicLimits(NetLimits(connections_max=2))) as server:
        first, second = await server.client(), await server.client()
        third = await server.client()
        assert third.reason is not None and "too many connections: 2 are open" in third.reason
        assert first.reason is None and second.reason is None
        assert server.counters.rejected == {"too many connections": 1}


async def test_one_stream_more_than_the_limit_waits_until_another_ends(tmp_path: Path) -> None:
    limits = dataclasses.replace(QUICK, windows=Windows(streams_max=2))
    async with quic_server(tmp_path, limits) as server:
        client = await server.client()
        streams = [client.say(b"%d" % number) for number in range(3)]
        await until(lambda: len(server.sessions) == 2 and streams[1] in client.heard)
        assert streams[2] not in client.heard
        client.carrier.send(streams[0], b"", finish=True)
        await until(lambda: client.said(streams[2]) == b"2")


async def test_a_stream_that_the_peer_gives_up_is_lost_and_the_others_are_not(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        client = await server.client()
        one, two = client.say(b"one"), client.say(b"two")
        await until(lambda: len(client.heard) == 2)
        client.carrier.abort(one)
        await until(lambda: server.sessions[0].calls == ["lost"])
        client.carrier.send(two, b" more")
        await until(lambda: client.heard[two] == b"two more")


async def test_a_drain_lets_sessions_finish_and_then_closes(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        client, idle = await server.client(), await server.client()
        stream = client.say(b"x")
        await until(lambda: stream in client.heard)
        assert await server.listener.drain(5.0) == 0
        assert server.sessions[0].calls == ["closing", "lost"]
        await until(lambda: client.reason is not None and idle.reason is not None)
        assert server.counters.open_by_protocol == {"test": 0}


async def test_what_is_no_quic_is_not_answered(tmp_path: Path) -> None:
    dice = random.Random(7)
    async with quic_server(tmp_path, QUICK) as server:
        client = await server.client()
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            for size in (0, 1, 2, 9, 40, 1_199, 1_200, 1_500, 9_000):
                for first in (0x00, 0x40, 0x80, 0xC0, 0xFF):
                    sock.sendto((bytes([first]) + dice.randbytes(size))[:size], ("127.0.0.1", server.listener.port))
        stream = client.say(b"still here")
        await until(lambda: client.said(stream) == b"still here")
        assert len(server.sessions) == 1


async def test_a_reply_carries_the_acknowledgement_of_its_request(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        client = await server.client()
        stream = client.say(b"x")
        await until(lambda: client.said(stream) == b"x")
        received, receive = list[bytes](), client.carrier.receive_datagram

        def count_and_receive(data: bytes, address: NetworkAddress) -> None:
            received.append(data)
            receive(data, address)

        monkeypatch.setattr(client.carrier, "receive_datagram", count_and_receive)
        for count in range(2, 52):
            client.carrier.send(stream, b"x")
            await until(lambda count=count: len(client.said(stream)) == count)  # type: ignore[misc]  # bound for this turn
            await asyncio.sleep(0.002)  # the time after which an acknowledgement leaves alone
        assert len(received) < 75, "there were 100 with datagrams for the acknowledgements alone"


async def test_few_connections_of_a_socket_send_in_one_iteration_of_the_loop() -> None:
    turns, had = CarrierTurns(), list[int]()
    for number in range(2 * TURNS_AT_ONCE + 1):
        turns.add(partial(had.append, number))
    counts = []
    while len(had) <= 2 * TURNS_AT_ONCE:
        await asyncio.sleep(0)
        counts.append(len(had))
    assert counts == [TURNS_AT_ONCE, 2 * TURNS_AT_ONCE, 2 * TURNS_AT_ONCE + 1]
    assert had == sorted(had), "in order"


async def test_loss_doubling_and_disorder_change_nothing(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server, UdpProxy("127.0.0.1", server.listener.port) as proxy:
        client = await server.client(proxy.port)
        proxy.lost, proxy.doubled, proxy.delayed = 0.1, 0.1, 0.1
        sent = random.Random(1).randbytes(600_000)
        stream = client.say(sent)
        await until(lambda: len(client.heard.get(stream, b"")) == len(sent))
        assert client.heard[stream] == sent
        assert proxy.dropped > 0


async def test_a_certificate_is_made_once_and_its_key_is_private(tmp_path: Path) -> None:
    tls = self_signed(tmp_path, now=NOW)
    assert tls.key_file.stat().st_mode & 0o777 == 0o600
    assert self_signed(tmp_path, now=NOW) == tls and fingerprint(self_signed(tmp_path, now=NOW)) == fingerprint(tls)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["quic-certificate.pem", "quic-key.pem"]
    tls.certificate_file.unlink()
    assert fingerprint(self_signed(tmp_path, now=NOW)) != ""


async def test_a_client_knows_its_server_by_fingerprint_or_by_who_vouches_for_it(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        right = fingerprint(server.tls)
        colons = ":".join(right[at : at + 2] for at in range(0, len(right), 2)).upper()
        assert (await server.client(tls=ClientTls(fingerprint=colons))).endpoint.distrust() is None
        wrong = await server.client(tls=ClientTls(fingerprint="00" * 32))
        assert "fingerprint" in (wrong.endpoint.distrust() or "")
        vouched = await server.client(tls=ClientTls(ca_file=server.tls.certificate_file))
        assert vouched.reason is None
        stranger = await server.client(tls=ClientTls())
        assert stranger.reason is not None


async def test_a_client_that_is_asked_to_prove_its_address_does_so_and_is_served(tmp_path: Path) -> None:
    async with quic_server(tmp_path, PROVING) as server:
        client = await server.client()
        stream = client.say(b"here I am")
        await until(lambda: client.said(stream) == b"here I am")
        assert client.carrier._quic._retry_count == 1, "the library saw one Retry"


async def test_nothing_is_kept_for_an_address_that_does_not_answer_a_retry(tmp_path: Path) -> None:
    async with quic_server(tmp_path, PROVING) as server:
        for _ in range(50):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forged:
                forged.sendto(_initial(), ("127.0.0.1", server.listener.port))
        client = await server.client()
        await until(lambda: client.carrier._quic._handshake_confirmed)
        assert server.counters.accepted == 1


async def test_a_flood_of_unfinished_handshakes_makes_newcomers_prove_themselves(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        for _ in range(QUIC_UNPROVEN_MAX + 20):
            with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forged:
                forged.sendto(_initial(), ("127.0.0.1", server.listener.port))
        await until(lambda: server.counters.accepted == QUIC_UNPROVEN_MAX)
        client = await server.client()
        assert client.carrier._quic._retry_count == 1
        assert server.counters.accepted == QUIC_UNPROVEN_MAX + 1, "nothing was kept for the rest of the flood"


async def test_a_token_from_elsewhere_is_not_believed(tmp_path: Path) -> None:
    async with quic_server(tmp_path, PROVING) as server:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as forged:
            forged.sendto(_initial(token=random.Random(1).randbytes(80)), ("127.0.0.1", server.listener.port))
        await server.client()
        assert server.counters.accepted == 1


async def test_a_renewed_certificate_is_shown_to_new_connections_and_no_open_one_is_dropped(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        staying = await server.client()
        (tmp_path / "new").mkdir()
        renewed: ServerTls = self_signed(tmp_path / "new", now=NOW)
        server.listener.renew(renewed)
        arriving = await server.client(tls=ClientTls(fingerprint=fingerprint(renewed)))
        assert arriving.endpoint.distrust() is None
        stream = staying.say(b"still here")
        await until(lambda: staying.said(stream) == b"still here")


def _initial(token: bytes = b"") -> bytes:
    """Return the first datagram of a connection whose client never continues."""
    quic = QuicConnection(configuration=QuicConfiguration(alpn_protocols=["test"], is_client=True))
    quic._peer_token = token
    quic.connect(("127.0.0.1", 1), now=0.0)
    ((datagram, _),) = quic.datagrams_to_send(now=0.0)
    return datagram


async def test_a_client_without_its_certificate_opens_no_stream_even_in_its_first_datagrams(tmp_path: Path) -> None:
    async with quic_server(tmp_path) as server:
        trusting = ServerTls(server.tls.certificate_file, server.tls.key_file, client_ca_file=server.tls.certificate_file)
        server.listener.renew(trusting)
        endpoint = await ClientEndpoint.open(
            "127.0.0.1", server.listener.port, alpn=ALPN, tls=ClientTls(fingerprint=fingerprint(server.tls)), idle_seconds=60
        )
        client = Client(endpoint)
        try:
            endpoint.start()
            client.say(b"too early")
            await until(lambda: client.reason is not None)
            assert "no client certificate was presented" in str(client.reason)
            assert server.sessions == []
        finally:
            endpoint.close()


async def test_a_peer_without_a_certificate_is_closed_at_the_deadline_where_one_is_needed(tmp_path: Path) -> None:
    limits = dataclasses.replace(QUICK, net=NetLimits(linger_seconds=0.5, login_seconds=0.3))
    async with quic_server(tmp_path, limits) as server:
        server.needs_login = True
        late = await server.client()
        await until(lambda: late.reason is not None)
        assert late.reason is not None and "no login in time" in late.reason


async def test_what_streams_have_unsent_counts_for_the_bound_of_all_connections(tmp_path: Path) -> None:
    async with quic_server(tmp_path, QUICK) as server:
        server.is_mute = True
        client = await server.client()
        client.say(b"x")
        await until(lambda: len(server.sessions) == 1)
        server.sessions[0].link.send(bytes(1 << 20))
        assert server.counters.output.unsent_bytes == 1 << 20
        client.carrier.close(0, "")
        await until(lambda: server.counters.output.unsent_bytes == 0)
