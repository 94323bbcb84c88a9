"""Faults on a cluster of three nodes and two brokers under load: nothing acknowledged is lost, doubled or reordered.

`make test-kafka-faults` runs 100 rounds; KAFKA_FAULT_ROUNDS and KAFKA_FAULT_SEED choose others.
"""

from __future__ import annotations

import os
import random
from itertools import islice
from pathlib import Path
from typing import cast

import pytest

import headrace
from headrace.clients.flymq.client import FlyMqClient
from headrace.kafka_server import Cluster
from tests.conftest import Proof
from tests.kafka.faulty import Subject, Verdict, drawn, judge, stored
from tests.kafka.loads import BATCH, Groups, Ledger, Load

ROUNDS = int(os.environ.get("KAFKA_FAULT_ROUNDS", "5"))
SEED = int(os.environ.get("KAFKA_FAULT_SEED", "1"))


@pytest.mark.timeout(600 + 120 * ROUNDS)
async def test_no_fault_loses_doubles_or_reorders_what_was_acknowledged(kafka_cluster: Cluster, tmp_path: Path, proof: Proof) -> None:
    chance = random.Random(SEED)
    subject = Subject(kafka_cluster, tmp_path, "ledger")
    history: list[str] = []
    try:
        await subject.serving()
        async with headrace.connect(f"flymq://{','.join(subject.tcp)}") as client:
            await client.create_topic("ledger", partitions=Load.PARTITIONS)
            groups = Groups("ledger", subject)
            load = Load("ledger", subject, groups)
            await load.start()
            try:
                await load.progressed()
                for name in islice(drawn(chance), ROUNDS):
                    history.append(name)
                    await subject.fault(name, chance)
                    await load.progressed()
                    await subject.coordinator()
            finally:
                await load.stop()
            undelivered, unsettled = await groups.caught_up(load.ledgers, cast(FlyMqClient, client))
            await groups.stop()
        found = stored(kafka_cluster, "faults.ledger", Load.PARTITIONS)
        verdict = judge(load.ledgers, found, undelivered=undelivered, unsettled=unsettled)
    finally:
        subject.close()
    for what, count in (
        ("Kafka faults under load", ROUNDS),
        ("records acknowledged during Kafka faults", verdict.acknowledged),
        ("records lost during Kafka faults", verdict.lost),
        ("records doubled during Kafka faults", verdict.doubled),
        ("records reordered during Kafka faults", verdict.reordered),
        ("records not delivered to a group or not settled during Kafka faults", verdict.undelivered + verdict.unsettled),
        ("new coordinators during Kafka faults", subject.failovers),
        ("connections handed over to the coordinator during Kafka faults", subject.relayed),
        ("versions of writers repeated without effect during Kafka faults", sum(writer.repeated for writer in load.writers)),
    ):
        proof(what, count)
    assert verdict == Verdict(verdict.acknowledged, verdict.unknown), (SEED, history)
    assert all(len(ledger.acknowledged) >= (ROUNDS + 1) * BATCH for ledger in load.ledgers)
    assert subject.relayed > 0


def test_the_verdict_counts_every_broken_promise() -> None:
    ledger = Ledger([0, 1, 2, 3], {4}, {5, 6})
    assert judge([ledger], [[0, 1, 2, 3, 6]]) == Verdict(4, 2)
    assert judge([ledger], [[0, 2, 3]]).lost == 1
    assert judge([ledger], [[0, 1, 1, 2, 3]]).doubled == 1
    assert judge([ledger], [[0, 2, 1, 3]]).reordered == 1
    assert judge([ledger], [[0, 1, 2, 6, 3]]).reordered == 1
    assert judge([ledger], [[0, 1, 2, 3, 4]]).refused_but_stored == 1
    assert judge([ledger], [[0, 1, 2, 3]], undelivered=1, unsettled=2) == Verdict(4, 2, undelivered=1, unsettled=2)


def test_a_late_value_of_unknown_outcome_breaks_no_promise_of_single_records() -> None:
    ledger = Ledger([0, 1, 2, 3], {4}, {5, 6}, may_be_late=True)
    assert judge([ledger], [[0, 1, 2, 6, 3]]).reordered == 0
    assert judge([ledger], [[0, 2, 6, 1, 3]]).reordered == 1
