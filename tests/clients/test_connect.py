"""`connect` and the common client API for every protocol, and the errors of unsupported methods."""

from __future__ import annotations

import asyncio
import importlib
import inspect
import socket
import ssl
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from datetime import UTC, datetime
from itertools import count
from pathlib import Path
from typing import Any

import pytest

import headrace
from headrace.clients import diagnosis
from headrace.clients.api import Client, Subscription
from headrace.clients.blipmq.client import BlipMqClient, BlipMqOptions
from headrace.clients.blipmq.subscription import Subscription as BlipMqSubscription
from headrace.clients.connect import Address, supports
from headrace.clients.figg.client import FiggClient
from headrace.clients.figg.subscription import Subscription as FiggSubscription
from headrace.clients.flymq.client import FlyMqClient
from headrace.clients.fujin.client import FujinClient
from headrace.clients.fujin.subscription import Subscription as FujinSubscription
from headrace.clients.messages import ConnectionState, Message
from headrace.clients.polling import PollingSubscription
from headrace.clients.rustlog.client import RustLogClient
from headrace.clients.stream import CERTIFICATE_REQUIRED, Stream
from headrace.server import certificates
from tests.canaries import secret
from tests.net.proxy import FaultProxy
from tests.protocols.peers import API_KEY, PEERS, WAIT_SECONDS, Broker, Peer, serving

NAMES = count()
peers = pytest.mark.parametrize("peer", PEERS, ids=str)
PROTOCOLS = ("figg", "rustlog", "blipmq", "flymq")


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("connect")) as broker:
        yield broker


@pytest.fixture
async def topic(broker: Broker) -> str:
    name = f"connect-{next(NAMES)}"
    async with broker.connect("flymq") as client:
        await client.create_topic(name)
    return name


def all_clients(figg: FiggClient, flymq: FlyMqClient, blipmq: BlipMqClient, rustlog: RustLogClient, fujin: FujinClient) -> list[Client]:
    """Never called: the type checker runs this test."""
    return [figg, flymq, blipmq, rustlog, fujin]


def all_subscriptions(
    figg: FiggSubscription, blipmq: BlipMqSubscription, polling: PollingSubscription, fujin: FujinSubscription
) -> list[Subscription]:
    """Never called, as above."""
    return [figg, blipmq, polling, fujin]


# Addresses.


@pytest.mark.parametrize(
    "url, address",
    [
        ("figg://localhost", Address("figg", "localhost", 8119)),
        ("flymq://127.0.0.1:1", Address("flymq", "127.0.0.1", 1)),
        ("blipmq://[::1]", Address("blipmq", "::1", 5555)),
        ("rustlog+tls://broker.example:65535/", Address("rustlog", "broker.example", 65_535, tls=True)),
        ("flymq://a:1,b,[::1]:3", Address("flymq", "a", 1, others=(("b", 9092), ("::1", 3)))),
    ],
)
def test_a_url_names_protocol_host_port_and_tls(url: str, address: Address) -> None:
    assert Address.parse(url) == address
    assert Address.parse(str(address)) == address


@pytest.mark.parametrize(
    "url, complaint",
    [
        ("kafka://localhost", "must start with one of figg://"),
        ("localhost:9092", "must start with one of figg://"),
        ("", "must start with one of figg://"),
        ("tls+figg://localhost", "must start with one of figg://"),
        ("figg://", "is not figg://HOST:PORT"),
        ("figg://localhost:0", "is not figg://HOST:PORT"),
        ("figg://localhost/topic", "is not figg://HOST:PORT"),
        ("figg://localhost?x=1", "is not figg://HOST:PORT"),
        ("figg://localhost:65536", "a number from 1 to 65535"),
        ("figg://localhost:http", "a number from 1 to 65535"),
        ("figg://[::1", "a number from 1 to 65535"),
        ("figg://a:1,", "is not figg://HOST:PORT"),
        ("figg://a:1,b:x", "a number from 1 to 65535"),
        ("figg://a:1/topic,b:2", "is not figg://HOST:PORT"),
        ("blipmq://:hunter2@localhost", "must not contain a secret"),
        ("blipmq://:x,hunter2@localhost", "must not contain a secret"),
    ],
)
def test_an_invalid_url_is_reported_without_its_secrets(url: str, complaint: str) -> None:
    with pytest.raises(headrace.InvalidUrl, match=complaint) as caught:
        headrace.connect(url)
    assert "hunter2" not in str(caught.value)


def test_options_that_do_not_fit_the_protocol_are_refused_at_once() -> None:
    with pytest.raises(TypeError, match="flymq:// takes FlyMqOptions, not BlipMqOptions"):
        headrace.connect("flymq://localhost", options=BlipMqOptions())
    with pytest.raises(headrace.InvalidUrl, match="needs an API key: give api_key"):
        headrace.connect("blipmq://localhost")
    with pytest.raises(headrace.NotSupported, match="API keys"):
        headrace.connect("figg://localhost", api_key="key")
    with pytest.raises(headrace.NotSupported, match="resend_writes=False"):
        headrace.connect("figg://localhost", resend_writes=False)
    with pytest.raises(headrace.InvalidUrl, match=r"certificates require TLS: use figg\+tls://"):
        headrace.connect("figg://localhost", ca_file="ca.pem")


def test_importing_the_package_is_cheap_and_gives_every_name() -> None:
    script = (
        "import sys, headrace\n"
        "assert not {'asyncio', 'ssl', 'msgspec', 'headrace.clients'} & set(sys.modules), 'too much'\n"
        "for name in dir(headrace): getattr(headrace, name)\n"
        "assert headrace.sync.connect and headrace.connect and headrace.SyncClient\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=WAIT_SECONDS)
    with pytest.raises(AttributeError, match="has no attribute 'conect'"):
        headrace.conect  # type: ignore[attr-defined]  # noqa: B018  (that is what is tested)


@peers
async def test_every_protocol_takes_the_same_arguments_and_says_what_it_cannot_carry(broker: Broker, peer: Peer) -> None:
    url = f"{peer.protocol}://{broker.address}"
    carried = {"flymq": {"user", "api_key"}, "blipmq": {"api_key"}}.get(peer.protocol, set())
    logins: dict[str, Any] = {"user": {"user": "ann", "password": secret("password")}, "api_key": {"api_key": API_KEY}}
    for login, arguments in logins.items():
        if login in carried:
            async with asyncio.timeout(WAIT_SECONDS), headrace.connect(url, connect_seconds=60, publish_seconds=60, **arguments) as client:
                await client.ping()
        else:
            with pytest.raises(headrace.NotSupported, match=f"(?i){peer.protocol} does not support .*; flymq://"):
                headrace.connect(url, **arguments)
    wrongs: list[tuple[dict[str, Any], str]] = [
        ({"password": "x"}, "password: needs a user"),
        ({"user": "ann", "api_key": "k"}, "api_key: give either an API key or a user"),
        ({"connect_seconds": "5"}, "connect_seconds: expected seconds, got '5'"),
        ({"publish_seconds": -1}, "publish_seconds: expected seconds, got -1"),
    ]
    for wrong, complaint in wrongs:
        with pytest.raises(headrace.InvalidArgument, match=complaint):
            headrace.connect(url, **wrong)
    with pytest.raises(headrace.InvalidArgument, match="url: expected str, got int"):
        headrace.connect(9092)  # type: ignore[arg-type]  # the error under test


def test_both_ways_to_connect_have_the_same_arguments() -> None:
    blocking, awaited = inspect.signature(headrace.sync.connect), inspect.signature(headrace.connect)
    assert list(blocking.parameters) == list(awaited.parameters)
    assert {"user", "password", "api_key", "tls", "connect_seconds", "publish_seconds"} < set(awaited.parameters)


def test_every_error_of_the_package_is_exported_and_has_one_base() -> None:
    for module in ("headrace.errors", "headrace.clients.errors"):
        for name, kind in vars(importlib.import_module(module)).items():
            if inspect.isclass(kind) and issubclass(kind, Exception) and kind.__module__ == module:
                assert getattr(headrace, name) is kind
                assert issubclass(kind, headrace.HeadraceError)


# Common API.


@peers
async def test_a_client_publishes_counts_and_pings_whatever_it_speaks(broker: Broker, topic: str, peer: Peer) -> None:
    states: list[ConnectionState] = []
    url = f"{peer.protocol}://{broker.address}"
    async with asyncio.timeout(WAIT_SECONDS):
        api_key = API_KEY if peer.needs_api_key else None
        async with headrace.connect(url, api_key=api_key, on_state=lambda state, reason: states.append(state)) as client:
            receipt = await client.publish(topic, b"first")
            assert (receipt.topic, receipt.partition, receipt.offset) == (topic, 0, 0 if peer.has_receipts else None)

            async def slowly() -> AsyncIterator[bytes]:
                for value in (b"2", b"3"):
                    await asyncio.sleep(0)
                    yield value

            assert await client.publish_many(topic, (b"%d" % number for number in range(5_000))) == 5_000
            assert await client.publish_many(topic, slowly()) == 2
            await client.flush()
            await client.ping()
            assert (client.is_connected, client.unacknowledged) == (True, 0)
        assert states == [ConnectionState.CONNECTED, ConnectionState.CLOSED]
        with pytest.raises(headrace.ClientClosed):
            await client.publish(topic, b"late")
        with pytest.raises(headrace.ClientClosed):
            await client.ping()
    async with broker.connect("flymq") as reader:
        assert (await reader.fetch(topic, 5_001))[-1] == Message(topic, 0, 5_002, b"3")


@peers
async def test_awaiting_gives_a_client_that_the_user_closes(broker: Broker, topic: str, peer: Peer) -> None:
    client = await broker.connect(peer)
    await client.publish(topic, b"x")
    await client.close()
    assert not client.is_connected
    assert client.abandon() == (0, 0)


@peers
async def test_records_on_their_way_when_the_connection_is_lost_are_sent_again(broker: Broker, topic: str, peer: Peer) -> None:
    host, port = broker.process.addresses[0]
    async with asyncio.timeout(WAIT_SECONDS), FaultProxy(host, port) as proxy:
        url = f"{peer.protocol}://{proxy.host}:{proxy.port}"
        api_key = API_KEY if peer.needs_api_key else None
        async with headrace.connect(url, api_key=api_key, backoff=lambda attempt: 0.01) as client:
            await client.publish(topic, b"before")
            proxy.cut()
            assert await client.publish_many(topic, [b"%d" % number for number in range(100)]) == 100
        assert proxy.connections >= 2
    async with broker.connect("flymq") as reader:
        values = [message.value for message in await reader.fetch(topic)]
    assert [value for index, value in enumerate(values) if value not in values[:index]] == [b"before", *(b"%d" % n for n in range(100))]


@peers
async def test_an_unknown_outcome_is_its_own_error(broker: Broker, topic: str, peer: Peer) -> None:
    host, port = broker.process.addresses[0]
    async with asyncio.timeout(WAIT_SECONDS), FaultProxy(host, port) as proxy:
        url = f"{peer.protocol}://{proxy.host}:{proxy.port}"
        client = await headrace.connect(url, api_key=API_KEY if peer.needs_api_key else None)
        proxy.hold_answers()
        await client.send_many(topic, [b"a", b"b"])
        with pytest.raises(headrace.OutcomeUnknown) as caught:
            await client.close(timeout=0.1)
        assert caught.value.count == 2


@peers
async def test_no_broker_is_a_failed_connection(peer: Peer) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
    with pytest.raises(headrace.ConnectFailed, match=f"cannot connect to 127.0.0.1:{port}: connection refused"):
        await headrace.connect(f"{peer.protocol}://127.0.0.1:{port}", api_key=API_KEY if peer.needs_api_key else None)


@peers
async def test_a_silent_server_is_a_failed_connection_and_no_state_is_reported(peer: Peer) -> None:
    states: list[ConnectionState] = []
    with socket.create_server(("127.0.0.1", 0)) as mute:  # the kernel accepts connections, the test does not
        url = f"{peer.protocol}://127.0.0.1:{mute.getsockname()[1]}"
        with pytest.raises(headrace.ConnectFailed, match="within 0.2 s"):
            await headrace.connect(
                url,
                api_key=API_KEY if peer.needs_api_key else None,
                connect_seconds=0.2,
                on_state=lambda state, reason: states.append(state),
            )
    assert states == []


@asynccontextmanager
async def foreign(greeting: bytes, answer: bytes) -> AsyncIterator[int]:
    """Serve something else: send a greeting, then an answer to the first bytes, then close."""

    async def talk(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(greeting)
        await reader.read(1)
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(talk, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@peers
@pytest.mark.parametrize(
    "greeting, answer, reason",
    [
        (b"", b"HTTP/1.1 400 Bad Request\r\n\r\n", "the port serves HTTP: is it a web server"),
        (bytes.fromhex("000006 04 00 00000000 0005 0000ffff"), b"", r"the port serves HTTP/2 \(gRPC\): is it the Flight endpoint"),
        (b"", b"", "is it a {protocol} server"),
    ],
    ids=["http", "flight", "silence"],
)
async def test_a_port_of_something_else_is_a_failed_connection_with_the_likely_reason(
    peer: Peer, greeting: bytes, answer: bytes, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "PROBE_SECONDS", WAIT_SECONDS)  # a slow machine takes more than a second to answer
    async with asyncio.timeout(WAIT_SECONDS), foreign(greeting, answer) as port:
        with pytest.raises(headrace.ConnectFailed, match=reason.format(protocol=peer.protocol)):
            await headrace.connect(f"{peer.protocol}://127.0.0.1:{port}", api_key=API_KEY if peer.needs_api_key else None)


@peers
async def test_tls_to_a_plain_port_and_plain_to_a_tls_port_name_the_scheme(
    broker: Broker, sealed: tuple[Broker, Path], peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(diagnosis, "PROBE_SECONDS", WAIT_SECONDS)
    api_key = API_KEY if peer.needs_api_key else None
    async with asyncio.timeout(WAIT_SECONDS):
        with pytest.raises(headrace.ConnectFailed, match=r"the port may not use TLS: remove \+tls"):
            await headrace.connect(f"{peer.protocol}+tls://{broker.address}", api_key=api_key)
        with pytest.raises(headrace.ConnectFailed, match=r"the port requires TLS: add \+tls"):
            await headrace.connect(f"{peer.protocol}://{sealed[0].address}", api_key=api_key)


# Settlement.


@pytest.mark.parametrize("protocol", ["flymq", "rustlog"])
async def test_an_acknowledged_message_moves_its_group_forward_only(broker: Broker, topic: str, protocol: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(protocol) as client:
        await client.publish_many(topic, [b"%d" % number for number in range(5)])
        subscription = await client.subscribe(topic, "earliest", group="g")
        messages = [await anext(subscription) for _ in range(4)]
        assert await messages[2].ack()
        assert await messages[0].ack()
        assert await client.committed(topic, group="g") == 3
        with pytest.raises(RuntimeError, match="not today"):
            async with messages[3]:
                raise RuntimeError("not today")
        assert await client.committed(topic, group="g") == 3
        if protocol == "rustlog":
            with pytest.raises(headrace.NotSupported, match="nack"):
                await messages[3].nack()
        async with messages[3]:
            pass
        assert await client.committed(topic, group="g") == 4


async def test_a_member_of_a_group_may_nack_a_record(broker: Broker, topic: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as client:
        await client.publish_many(topic, [b"a", b"b"])
        subscription = await client.subscribe(topic, "earliest", group="g", mode="shared")
        first = await anext(subscription)
        assert await first.nack() and not await first.ack()
        await (await anext(subscription)).ack()
        again = await anext(subscription)
        assert (again.value, again.offset) == (b"a", 0) and await again.ack()
        assert await client.committed(topic, group="g") == 2


async def test_a_group_that_is_moved_back_delivers_again(broker: Broker, topic: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as client:
        await client.publish_many(topic, [b"a", b"b"])
        subscription = await client.subscribe(topic, "earliest", group="g")
        for _ in range(2):
            await (await anext(subscription)).ack()
        await client.seek(topic, group="g", offset=1)
        again = await anext(subscription)
        assert again.value == b"b" and await again.ack()
        assert await client.committed(topic, group="g") == 2


async def test_an_acknowledged_delivery_does_not_come_again(broker: Broker, topic: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("blipmq") as client:
        subscription = await client.subscribe(topic)
        await client.publish_many(topic, [b"a", b"b"])
        async with await anext(subscription) as first:
            assert first.value == b"a"
        async with await anext(subscription) as second:
            assert second.value == b"b"
        assert await second.ack(), "once more changes nothing"
        with pytest.raises(headrace.NotSupported, match="delivers unacknowledged messages again"):
            await second.nack()
        await client.publish(topic, b"c")
        assert (await anext(subscription)).value == b"c"
        await subscription.commit()


@pytest.mark.parametrize("protocol", ["figg", "flymq", "rustlog"])
async def test_without_a_group_there_is_nothing_to_settle(broker: Broker, topic: str, protocol: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(protocol) as client:
        await client.publish(topic, b"a")
        subscription = await client.subscribe(topic, "earliest")
        message = await anext(subscription)
        for settle in (message.ack, message.nack, subscription.commit):
            with pytest.raises(headrace.NothingToSettle):
                await settle()


@pytest.mark.parametrize("protocol", ["figg", "flymq", "rustlog"])
async def test_an_unknown_start_position_is_an_error_that_names_the_known_ones(broker: Broker, topic: str, protocol: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(protocol) as client:
        await client.publish(topic, b"a")
        with pytest.raises(ValueError, match="'start': expected 'earliest', 'latest', an offset"):
            await client.subscribe(topic, "start")  # type: ignore[arg-type]  # the error under test


async def test_a_time_is_a_start_where_the_protocol_looks_up_times(broker: Broker, topic: str) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect("flymq") as client:
        await client.publish(topic, b"a")
        at = datetime(2020, 1, 1, tzinfo=UTC)
        assert (await anext(await client.subscribe(topic, at))).value == b"a"
        assert [message.value for message in await client.fetch(topic, at)] == [b"a"]
        assert await client.fetch(topic, datetime(2120, 1, 1, tzinfo=UTC)) == []
        assert await client.seek(topic, group="g", timestamp=0) == 0
        with pytest.raises(ValueError, match="an offset or to a timestamp"):
            await client.seek(topic, group="g")


# Unsupported methods.

LACKING = [
    ("figg", "fetch", ("t", 0), {}, "subscribe from the offset"),
    ("blipmq", "fetch", ("t", 0), {}, "subscribe and acknowledge the messages"),
    ("figg", "commit", ("t", 0), {"group": "g"}, "flymq:// and rustlog:// do"),
    ("blipmq", "committed", ("t",), {"group": "g"}, "flymq:// and rustlog:// do"),
    ("figg", "seek", ("t",), {"group": "g", "offset": 0}, "flymq:// and rustlog:// do"),
    ("rustlog", "seek", ("t",), {"group": "g", "timestamp": 0}, "flymq:// does"),
    ("rustlog", "offset_for_time", ("t", 0), {}, "flymq:// does"),
    ("figg", "create_topic", ("t",), {}, "publishing creates the topic"),
    ("rustlog", "delete_topic", ("t",), {}, "flymq:// does"),
    ("blipmq", "topics", (), {}, "flymq:// and rustlog:// do"),
    ("figg", "publish", ("t", b""), {"key": b"k"}, "flymq:// has them"),
    ("rustlog", "publish", ("t", b""), {"key": b"k"}, "flymq:// has them"),
    ("blipmq", "publish_many", ("t", [b""]), {"key": b"k"}, "flymq:// has them"),
    ("flymq", "publish", ("t", b""), {"headers": (("h", b"v"),)}, "fujin:// has them"),
    ("figg", "subscribe", ("t",), {"group": "g"}, "flymq:// and rustlog:// do"),
    ("figg", "subscribe", ("t", datetime.now(UTC)), {}, "flymq:// does"),
    ("rustlog", "subscribe", ("t", datetime.now(UTC)), {"partition": 0}, "flymq:// does"),
    ("blipmq", "subscribe", ("t", "earliest"), {}, "flymq:// and rustlog:// do"),
    ("blipmq", "subscribe", ("t",), {"partition": 1}, "flymq:// and rustlog:// have them"),
]


@pytest.mark.parametrize(
    "protocol, method, arguments, options, instead", LACKING, ids=[f"{row[0]}-{row[1]}-{i}" for i, row in enumerate(LACKING)]
)
async def test_what_a_protocol_cannot_do_is_named_with_what_can(
    broker: Broker, protocol: str, method: str, arguments: tuple[object, ...], options: dict[str, object], instead: str
) -> None:
    async with asyncio.timeout(WAIT_SECONDS), broker.connect(protocol) as client:
        with pytest.raises(headrace.NotSupported) as caught:
            await getattr(client, method)(*arguments, **options)
    assert caught.value.instead.startswith(instead)
    assert str(caught.value).lower().startswith(f"{protocol} does not support ")


def test_supports_tells_beforehand_what_a_protocol_has() -> None:
    assert {protocol for protocol in PROTOCOLS if supports(protocol, "fetch")} == {"flymq", "rustlog"}
    assert {protocol for protocol in PROTOCOLS if supports(protocol, "offset_for_time")} == {"flymq"}
    assert all(supports(protocol, "publish") for protocol in PROTOCOLS)


# TLS.


@pytest.fixture(scope="module")
def sealed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Broker, Path]]:
    """Broker that requires client certificates, and their paths."""
    directory = tmp_path_factory.mktemp("sealed")
    certs = directory / "certs"
    certificates.init(certs, ("localhost",), datetime.now(UTC))
    certificates.client(certs, "reader", datetime.now(UTC))
    chosen = {"certificate": "server.pem", "key": "server.key", "client_ca": "ca.pem"}
    words = (word for key, file in chosen.items() for word in ("--set", f"tls.{key}={certs / file}"))
    with serving(directory, *words, quic=False) as broker:
        yield broker, certs


@peers
async def test_tls_with_a_certificate_of_our_own(sealed: tuple[Broker, Path], peer: Peer) -> None:
    broker, certs = sealed
    async with (
        asyncio.timeout(WAIT_SECONDS),
        headrace.connect(
            f"{peer.protocol}+tls://{broker.address}",
            api_key=API_KEY if peer.needs_api_key else None,
            ca_file=certs / "ca.pem",
            certificate_file=certs / "reader.pem",
            key_file=certs / "reader.key",
            server_name="localhost",
        ) as client,
    ):
        if supports(peer.protocol, "create_topic"):
            await client.create_topic(f"sealed-{peer}")
        assert await client.publish_many(f"sealed-{peer}", [bytes(1_000)] * 3_000) == 3_000


@peers
async def test_a_missing_client_certificate_fails_the_connection(sealed: tuple[Broker, Path], peer: Peer) -> None:
    broker, certs = sealed
    api_key = API_KEY if peer.needs_api_key else None
    with pytest.raises(headrace.ConnectFailed):
        await headrace.connect(
            f"{peer.protocol}+tls://{broker.address}", api_key=api_key, ca_file=certs / "ca.pem", server_name="localhost"
        )


async def test_the_alert_for_a_missing_client_certificate_is_explained() -> None:
    reasons: list[str] = []
    stream = Stream(lambda data: None, reasons.append)
    stream.connection_made(asyncio.Transport())
    stream.hand_over()
    alert = ssl.SSLError(1, "tlsv13 alert certificate required")
    alert.reason = "TLSV13_ALERT_CERTIFICATE_REQUIRED"
    stream.connection_lost(alert)
    assert reasons == [CERTIFICATE_REQUIRED]


async def test_an_untrusted_certificate_is_rejected(sealed: tuple[Broker, Path]) -> None:
    broker, certs = sealed
    with pytest.raises(headrace.ConnectFailed, match="is not trusted: unable to get local issuer|is not trusted: self"):
        await headrace.connect(f"flymq+tls://{broker.address}")
    with pytest.raises(headrace.ConnectFailed, match="is not trusted: .*mismatch"):
        await headrace.connect(f"flymq+tls://{broker.address}", ca_file=certs / "ca.pem", server_name="elsewhere.example")


async def test_a_file_that_is_no_certificate_is_named(sealed: tuple[Broker, Path], tmp_path: Path) -> None:
    broker, certs = sealed
    url = f"flymq+tls://{broker.address}"
    with pytest.raises(headrace.ConnectFailed, match="missing.pem: No such file"):
        await headrace.connect(url, ca_file=tmp_path / "missing.pem")
    (tmp_path / "empty.pem").write_text("nothing")
    with pytest.raises(headrace.ConnectFailed, match="empty.pem and the key in it: not a certificate"):
        await headrace.connect(url, ca_file=certs / "ca.pem", certificate_file=tmp_path / "empty.pem")
