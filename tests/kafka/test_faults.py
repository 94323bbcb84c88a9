"""Faults on a cluster of three nodes under load: nothing acknowledged is lost, doubled or reordered.

`make test-kafka-faults` runs 100 rounds; KAFKA_FAULT_ROUNDS and KAFKA_FAULT_SEED choose others.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import pytest

import headrace
from headrace.kafka_server import Cluster
from tests.conftest import Proof
from tests.kafka.faulty import BATCH, PARTITIONS, Ledger, Load, Subject, Verdict, judge, stored

ROUNDS = int(os.environ.get("KAFKA_FAULT_ROUNDS", "5"))
SEED = int(os.environ.get("KAFKA_FAULT_SEED", "1"))


@pytest.mark.timeout(300 + 120 * ROUNDS)
async def test_no_fault_loses_doubles_or_reorders_what_was_acknowledged(kafka_cluster: Cluster, tmp_path: Path, proof: Proof) -> None:
    chance = random.Random(SEED)
    subject = Subject(kafka_cluster, tmp_path, "ledger")
    history: list[str] = []
    try:
        await subject.serving()
        async with headrace.connect(subject.url) as client:
            await client.create_topic("ledger", partitions=PARTITIONS)
        load = Load("ledger", subject.url)
        try:
            await load.progressed()
            for _ in range(ROUNDS):
                history.append(await subject.fault(chance))
                await load.progressed()
        finally:
            await load.stop()
        verdict = judge(load.ledgers, stored(kafka_cluster, "faults.ledger"))
    finally:
        subject.close()
    assert verdict == Verdict(verdict.acknowledged, verdict.unknown), (SEED, history)
    assert verdict.acknowledged >= (ROUNDS + 1) * PARTITIONS * BATCH
    proof("Kafka faults under load", ROUNDS)
    proof("records acknowledged during Kafka faults", verdict.acknowledged)


def test_the_verdict_counts_every_broken_promise() -> None:
    ledger = Ledger([0, 1, 2, 3], {4}, {5, 6})
    assert judge([ledger], [[0, 1, 2, 3, 6]]) == Verdict(4, 2)
    assert judge([ledger], [[0, 2, 3]]).lost == 1
    assert judge([ledger], [[0, 1, 1, 2, 3]]).doubled == 1
    assert judge([ledger], [[0, 2, 1, 3]]).reordered == 1
    assert judge([ledger], [[0, 1, 2, 3, 4]]).refused_but_stored == 1
