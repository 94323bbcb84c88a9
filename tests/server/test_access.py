"""Access control of a broker process: the first password, the protocols, and the effect of changes."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

import headrace
from headrace.clients.blipmq.client import BlipMqClient, BlipMqOptions
from headrace.clients.errors import ConnectFailed, LoginRefused, Refused
from headrace.clients.figg.client import FiggClient, FiggOptions
from headrace.clients.flymq.client import FlyMqClient, FlyMqOptions
from headrace.errors import ConfigError, NotAuthorized
from headrace.server.addresses import require_caution
from headrace.server.config_sources import resolve
from headrace.wire.figg import encode
from headrace.wire.flymq.access_messages import AuditQuery
from tests.canaries import secret
from tests.server.process import BrokerProcess, start_error

ENFORCED = ("--set", "access.mode=enforced")
PASSWORD = secret("password")


def admin_password(directory: Path, mode: int = 0o600) -> Path:
    path = directory / "admin-password"
    path.touch(mode)
    path.write_text(PASSWORD + "\n")
    path.chmod(mode)
    return path


def enforced(directory: Path, *arguments: str) -> BrokerProcess:
    return BrokerProcess(directory, *ENFORCED, "--set", f"access.admin_password_file={admin_password(directory)}", *arguments)


async def log_in(broker: BrokerProcess, user: str = "admin", password: str = PASSWORD) -> FlyMqClient:
    return await FlyMqClient.connect(*broker.addresses[0], FlyMqOptions(user=user, password=password, connect_seconds=60.0))


def test_the_banner_says_when_access_is_open(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        _, out, _ = broker.stop()
    assert "  access open: every client may do everything (access.mode)\n" in out
    assert "password" not in out


async def test_the_first_start_shows_a_password_and_the_second_none(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, *ENFORCED) as broker:
        _, out, errors = broker.stop()
    (line,) = [line for line in out.splitlines() if "password shown this once" in line]
    password = line.split()[-1]
    assert password not in errors
    with BrokerProcess(tmp_path, *ENFORCED) as broker:
        async with await log_in(broker, password=password) as client:
            assert (await client.who_am_i()).roles == ["admin"]
        _, out, errors = broker.stop()
    assert "shown this once" not in out and password not in out + errors
    assert not any(password.encode() in path.read_bytes() for path in (tmp_path / "data").rglob("*") if path.is_file())


def test_a_password_file_that_others_can_read_stops_the_start(tmp_path: Path) -> None:
    path = admin_password(tmp_path, 0o604)
    text = start_error(tmp_path, *ENFORCED, "--set", f"access.admin_password_file={path}")
    assert text == f"access.admin_password_file: {path} can be read by others (mode 604); chmod 600 it"
    assert start_error(tmp_path, *ENFORCED, "--set", "access.admin_password_file=absent").endswith("No such file or directory")


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"listen.tcp": ["0.0.0.0:0"]}, "nothing is encrypted"),
        ({"listen.tcp": ["0.0.0.0:0"], "tls.certificate": "c", "tls.key": "k"}, r"clients are not authenticated \(flymq, rustlog, figg\)"),
        ({"listen.tcp": ["0.0.0.0:0=blipmq"], "tls.certificate": "c", "tls.key": "k"}, "every client may do everything"),
        ({"listen.tcp": ["0.0.0.0:0"], "tls.certificate": "c", "tls.key": "k", "tls.client_ca": "a"}, "set access.mode to enforced"),
        ({"listen.tcp": ["0.0.0.0:0=flymq"], "tls.certificate": "c", "tls.key": "k", "access.mode": "enforced"}, None),
        ({"listen.tcp": ["0.0.0.0:0"], "tls.certificate": "c", "tls.key": "k", "tls.client_ca": "a", "access.mode": "enforced"}, None),
        ({"listen.tcp": ["127.0.0.1:0"]}, None),
    ],
)
def test_open_access_stays_on_loopback(settings: dict[str, object], words: str | None) -> None:
    config = resolve(flags={name: ("--set", value) for name, value in settings.items()}).config
    if words is None:
        require_caution(config)
    else:
        with pytest.raises(ConfigError, match=words):
            require_caution(config)


async def test_each_protocol_knows_who_comes(tmp_path: Path) -> None:
    with enforced(tmp_path, "--set", "figg.principal=sensors") as broker:
        address = broker.addresses[0]
        async with await log_in(broker) as root:
            await root.create_topic("t")
            with pytest.raises(LoginRefused, match="invalid username or password"):
                await log_in(broker, password=secret("wrong-password"))
            await root.create_user("lorry", "", ["producer"])
            key = (await root.manage("key.create", owner="lorry"))["key"]
            with pytest.raises((ConnectFailed, Refused)):
                await BlipMqClient.connect(*address, options=BlipMqOptions(api_key="hr_aaaaaaaaaaaa_no"))
            async with await BlipMqClient.connect(*address, options=BlipMqOptions(api_key=key)) as blipmq:
                await blipmq.publish("t", b"by key")
            await root.manage("rule.add", subject="user:sensors", actions=["publish"], kind="topic", name="t")
            async with await FiggClient.connect(*address) as figg:
                await figg.publish("t", b"by the protocol")
            async with headrace.connect("flymq://{}:{}".format(*address), api_key=key) as by_key:
                assert isinstance(by_key, FlyMqClient)
                assert (await by_key.who_am_i()).user == "lorry"
                await by_key.publish("t", b"by key too")
            with pytest.raises(headrace.LoginRefused, match="invalid username or password"):
                await headrace.connect("flymq://{}:{}".format(*address), api_key=secret("hr_aaaaaaaaaaaa_no"))
            async with await FlyMqClient.connect(*address) as anonymous:
                with pytest.raises(NotAuthorized, match="anonymous may not publish"):
                    await anonymous.publish("t", b"by anonymous")
            assert [message.value for message in await root.fetch("t", 0)] == [b"by key", b"by the protocol", b"by key too"]
            denials = await root.audit(AuditQuery(types=["denial"]))
            assert {(event.user, event.address) for event in denials.events} == {("anonymous", "127.0.0.1")}
        assert broker.stop()[0] == 0


async def test_a_figg_client_without_rights_ends_with_an_error_after_a_few_connections(tmp_path: Path) -> None:
    """Figg has no error frame: the broker can only close the connection. It says so in a few lines of its log."""
    with enforced(tmp_path) as broker:
        async with await log_in(broker) as root:
            await root.create_topic("t")
        options = FiggOptions(backoff=lambda failures: 0.0, refused_connections_max=8)
        for method, arguments in (("subscribe", ("t", "earliest")), ("publish", ("t", b"x"))):
            async with asyncio.timeout(300), await FiggClient.connect(*broker.addresses[0], options) as figg:
                with pytest.raises(headrace.RefusedRepeatedly, match="not logged in or not allowed") as caught:
                    await getattr(figg, method)(*arguments)
                assert caught.value.count == 8
        code, _, log = broker.stop()
        lines = [line for line in log.splitlines() if "connection closed" in line and "not_authorized" in line]
        assert (code, len(lines)) == (0, 5)


async def test_a_change_reaches_open_connections_with_their_next_request(tmp_path: Path) -> None:
    with enforced(tmp_path) as broker:
        async with await log_in(broker) as root:
            await root.create_topic("t")
            await root.create_user("ann", PASSWORD, ["producer", "consumer"])
            ann = await log_in(broker, "ann")
            await ann.publish("t", b"x")
            changes: dict[str, Callable[[], Awaitable[object]]] = {
                "deny": lambda: root.manage("rule.add", subject="user:ann", effect="deny", actions=["publish"], kind="topic", name="t"),
                "allow": lambda: root.manage("rule.remove", subject="user:ann", effect="deny", actions=["publish"], kind="topic", name="t"),
                "disable": lambda: root.alter_user("ann", ["producer"], enabled=False),
                "enable": lambda: root.alter_user("ann", ["producer"], enabled=True),
                "password": lambda: root.change_password("ann", "another password"),
            }
            for name, change in changes.items():
                await change()
                if name in ("allow", "enable"):
                    await ann.publish("t", b"x")
                else:
                    with pytest.raises(NotAuthorized):
                        await ann.publish("t", b"x")
            ann.abandon()
        assert broker.stop()[0] == 0


async def test_a_reader_that_is_followed_by_a_denial_hears_nothing_more(tmp_path: Path) -> None:
    """The cursor of an open Figg reader is closed."""
    with enforced(tmp_path) as broker:
        async with await log_in(broker) as root:
            await root.create_topic("t")
            await root.manage("rule.add", subject="user:anonymous", actions=["read"], kind="topic", name="t")
            reader, writer = await asyncio.open_connection(*broker.addresses[0])
            writer.write(encode.attach("t", 0))
            await root.publish("t", b"before")
            received = b""
            async with asyncio.timeout(300):
                while b"before" not in received:
                    received += await reader.read(1000)
            await root.manage("rule.remove", subject="user:anonymous", actions=["read"], kind="topic", name="t")
            async with asyncio.timeout(300):
                rest = await reader.read(-1)
            assert rest == b""
            writer.close()
        assert broker.stop()[0] == 0
