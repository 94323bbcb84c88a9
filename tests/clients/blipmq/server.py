"""BlipMQ on a real socket over the memory engine, behind a fault-injecting proxy."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace.broker.authorizer import Principal
from headrace.broker.broker import Broker
from headrace.broker.groups.subscriptions import SubscriptionBook
from headrace.clients.blipmq.client import BlipMqClient, BlipMqOptions
from headrace.clients.messages import OnState
from headrace.engine.memory import MemoryEngine
from headrace.net.listener import Listener
from headrace.net.protocol import ServedProtocol
from headrace.retry import exponential
from headrace.sessions.blipmq.keys import api_keys
from headrace.sessions.blipmq.session import BlipMqSession
from headrace.sessions.blipmq.settings import BlipMqSettings
from headrace.sessions.blipmq.subscriptions import Subscriptions
from headrace.wire.blipmq import sniff
from tests.net.proxy import FaultProxy

WHO = Principal("dev", "blipmq")


def clock() -> int:
    return time.time_ns() // 1_000_000


@dataclass
class Served:
    broker: Broker
    engine: MemoryEngine
    subscriptions: Subscriptions
    proxy: FaultProxy

    async def client(self, *, on_state: OnState = lambda state, reason: None, **options: float) -> BlipMqClient:
        chosen = BlipMqOptions(api_key="dev-key", backoff=exponential(first_seconds=0.01, seconds_max=0.05), on_state=on_state, **options)  # type: ignore[arg-type]  # whole numbers are floats here
        return await BlipMqClient.connect(self.proxy.host, self.proxy.port, options=chosen)

    def values(self, topic: str) -> list[bytes | None]:
        return [value for batch in self.engine._find(topic, 0).batches for value in batch.values()]


@asynccontextmanager
async def served(settings: BlipMqSettings = BlipMqSettings()) -> AsyncIterator[Served]:
    engine = MemoryEngine(clock=clock)
    broker = Broker(engine, clock=clock)
    await broker.open()
    subscriptions = Subscriptions(broker, SubscriptionBook(engine, "blipmq"), clock=clock, settings=settings)
    await subscriptions.open()
    verify_key = api_keys({"dev-key": "dev"})
    protocol = ServedProtocol("blipmq", sniff, lambda link: BlipMqSession(link, broker, subscriptions, verify_key=verify_key))
    listener = await Listener.open("127.0.0.1", 0, [protocol])
    try:
        async with FaultProxy(listener.host, listener.port) as proxy:
            yield Served(broker, engine, subscriptions, proxy)
    finally:
        await listener.drain(5)
        await subscriptions.close()
        await broker.close()
