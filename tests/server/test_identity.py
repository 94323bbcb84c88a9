"""The user on a protocol without a login: the name in the certificate, else the configured one."""

from __future__ import annotations

import asyncio

import pytest

from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.broker import Broker
from headrace.engine.memory import MemoryEngine
from headrace.net.protocol import Peer
from headrace.server.config_sources import resolve
from headrace.server.protocols import Protocols
from headrace.server.wiring import access_of
from headrace.sessions.contract import FramedSession
from tests.protocols.strain import PROTOCOLS, TOPIC


class Caller:
    """A peer that discards its output."""

    peer, local, unsent_bytes, has_peer_left, is_relayed = "127.0.0.1:1", "127.0.0.1:9092", 0, False, False

    def __init__(self, identity: str | None) -> None:
        self.identity = identity

    def logged_in(self, user: str, *, is_admin: bool) -> str | None:
        return None

    def send(self, frames: bytes) -> None: ...

    def close(self, reason: str, *, error: bool = True) -> None: ...

    def pause_reading(self) -> None: ...

    def resume_reading(self) -> None: ...

    def replace_session(self, session: FramedSession) -> None: ...


def clock() -> int:
    return 1_000


@pytest.mark.parametrize("identity", ["spiffe://mill/wheel", None])
@pytest.mark.parametrize("name", ["figg", "rustlog", "flymq"])
async def test_a_certificate_says_who_publishes(name: str, identity: str | None) -> None:
    publishers: set[Principal] = set()
    published = asyncio.Event()

    def remember(who: Principal, action: Action, resource: Resource) -> bool:
        if action is Action.PUBLISH:
            publishers.add(who)
            published.set()
        return True

    engine, config = MemoryEngine(clock=clock), resolve().config
    broker = Broker(engine, clock=clock, authorize=remember)
    await broker.open()
    await broker.create_topic(Principal("operator"), TOPIC)
    protocols = Protocols(broker, engine, config, access_of(config, engine, clock), clock=clock, blipmq_keys={})
    (protocol,) = protocols.named([name])
    peer: Peer = Caller(identity)
    session = protocol.open(peer)
    session.receive(PROTOCOLS[name].publish)
    async with asyncio.timeout(300):
        await published.wait()
    assert {(who.name, who.protocol) for who in publishers} == {(identity or "anonymous", name)}
    session.lost()
    await broker.close()
