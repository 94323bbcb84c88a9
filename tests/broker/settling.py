"""Queues of a group on the harness, and common steps of their tests."""

from __future__ import annotations

from headrace.broker import Delivery, Member, SettlementPolicy
from headrace.broker.groups.members import Start
from tests.broker.harness import ANN, Harness, turns

POLICY = SettlementPolicy(ack_timeout_ms=1_000, backoff_ms=100, backoff_max_ms=350, attempts_max=4)


def open_queue(
    harness: Harness, policy: SettlementPolicy = POLICY, *, group: str = "g", topic: str = "t", start: Start = "earliest"
) -> Member:
    return harness.broker.join(ANN, group, topic, policy=policy, mode="shared", start=start)


def offsets_of(deliveries: list[Delivery]) -> list[int]:
    return [delivery.offset for delivery in deliveries]


def ids_of(deliveries: list[Delivery]) -> list[int]:
    return [delivery.id for delivery in deliveries]


async def let_pass(harness: Harness, ms: int) -> None:
    await turns()
    harness.clock.tick(ms)
    await turns()


async def progress_of(harness: Harness, group: str = "g", partition: int = 0) -> int | None:
    """Return what the group has committed after the background commit."""
    await let_pass(harness, harness.settings.settlement_commit_ms)
    return harness.broker.committed(ANN, group, "t", partition)
