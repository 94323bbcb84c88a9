"""Queues of a group on the stand, and what their tests say again and again."""

from __future__ import annotations

from headrace.broker import Delivery, SettlementPolicy, SettlementQueue
from headrace.broker.groups.settlement import Start
from tests.broker.stand import ANN, Stand, turns

POLICY = SettlementPolicy(ack_timeout_ms=1_000, backoff_ms=100, backoff_max_ms=350, attempts_max=4)


def open_queue(
    stand: Stand, policy: SettlementPolicy = POLICY, *, group: str = "g", topic: str = "t", start: Start = "earliest"
) -> SettlementQueue:
    return stand.broker.queue(ANN, group, topic, policy=policy, start=start)


def offsets_of(deliveries: list[Delivery]) -> list[int]:
    return [delivery.offset for delivery in deliveries]


def ids_of(deliveries: list[Delivery]) -> list[int]:
    return [delivery.id for delivery in deliveries]


async def let_pass(stand: Stand, ms: int) -> None:
    await turns()
    stand.clock.tick(ms)
    await turns()


async def progress_of(stand: Stand, group: str = "g", partition: int = 0) -> int | None:
    """What the group has committed once the background commit is through."""
    await let_pass(stand, stand.settings.settlement_commit_ms)
    return stand.broker.committed(ANN, group, "t", partition)
