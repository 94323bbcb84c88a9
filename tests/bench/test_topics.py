"""`bench topics`: its figures, and the meter of transactions."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.bench.children import BenchFailed
from headrace.bench.topics import TransactionMeter, workloads
from headrace.wire.flymq import Dialect, Opcode, RequestDecoder, encode_failure, encode_reply
from headrace.wire.flymq.advanced_messages import (
    PlacedBatch,
    TxnBegin,
    TxnBeginBatch,
    TxnBegun,
    TxnCommit,
    TxnEnded,
    TxnProduceBatch,
    TxnWholeBatch,
)
from headrace.wire.flymq.messages import Failure, RecordMetadataBatch, RequestEvent
from tests.bench.commands import measured

VALUES = [[b"%d" % number] * 20 for number in range(3)]
SINGLES = [[b"%d" % number] for number in range(9)]


def requests_in(frames: bytes) -> list[RequestEvent]:
    """Return the requests one by one."""
    found: list[RequestEvent] = []
    for event in RequestDecoder().feed(frames):
        if isinstance(event, TxnWholeBatch):
            found += event.split(len(event))[0]
        else:
            found += event.requests() if isinstance(event, TxnBeginBatch) else [event]
    return found


def replies_to(requests: bytes) -> bytes:
    """Answer as a broker does."""
    frames, count = b"", 0
    for event in requests_in(requests):
        if isinstance(event, TxnProduceBatch):
            count = len(event)
            rows = RecordMetadataBatch(event.topic, [0] * count, [0] * count, [7] * count, [-1] * count, [1] * count)
            frames += encode_reply(Opcode.TXN_PRODUCE, rows)
        elif isinstance(event, TxnCommit):
            placed = PlacedBatch("t", [0] * count, [0] * count, [7] * count, [-1] * count, [1] * count)
            frames += encode_reply(Opcode.TXN_COMMIT, TxnEnded(event.transaction, True, [placed]))
    return frames


@pytest.mark.parametrize("id", ["txn-19c8a7b6d5e-1", "txn-19c8a7b6d5e-abc12"])
@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 100_000])
def test_the_meter_counts_the_records_of_committed_transactions_however_replies_are_cut(id: str, piece_bytes: int) -> None:
    meter = TransactionMeter("t", VALUES)
    assert set(map(type, requests_in(meter.begins))) == {TxnBegin}
    requests = b""
    for number in range(len(VALUES)):
        frame = encode_reply(Opcode.TXN_BEGIN, TxnBegun(f"{id}{number}"))
        requests += meter.feed(bytearray(frame + b"stale"), len(frame))
    sent = [event for event in requests_in(requests) if isinstance(event, TxnProduceBatch)]
    assert [(event.transaction, event.values) for event in sent] == [(f"{id}{number}", VALUES[number]) for number in range(3)]
    stream = replies_to(requests)
    for at in range(0, len(stream), piece_bytes):
        assert meter.count == 0 or at > 0
        piece = stream[at : at + piece_bytes]
        meter.feed(bytearray(piece + b"stale"), len(piece))
    assert meter.count == 60


@pytest.mark.parametrize("piece_bytes", [1, 7, 100, 100_000])
def test_the_meter_counts_transactions_of_one_record_whose_ids_become_longer(piece_bytes: int) -> None:
    meter = TransactionMeter("t", SINGLES)
    ids = [f"txn-19c8a7b6d5e-{number:x}" for number in range(0xFFFB, 0xFFFB + len(SINGLES))]
    begun = b"".join([encode_reply(Opcode.TXN_BEGIN, TxnBegun(id)) for id in ids])
    requests = b""
    for at in range(0, len(begun), piece_bytes):
        piece = begun[at : at + piece_bytes]
        requests += meter.feed(bytearray(piece + b"stale"), len(piece))
    sent = requests_in(requests)
    assert [(event.transaction, event.values) for event in sent if isinstance(event, TxnProduceBatch)] == [*zip(ids, SINGLES, strict=True)]
    assert [event.transaction for event in sent if isinstance(event, TxnCommit)] == ids
    # Begins of the next group may be answered between two commits.
    between = encode_reply(Opcode.TXN_BEGIN, TxnBegun("txn-19c8a7b6d5e-10010"))
    half = len(replies_to(requests[: len(requests) * 5 // len(SINGLES)]))
    stream = replies_to(requests)
    stream = stream[:half] + between + stream[half:]
    for at in range(0, len(stream), piece_bytes):
        piece = stream[at : at + piece_bytes]
        assert meter.feed(bytearray(piece + b"stale"), len(piece)) == b""
    assert meter.count == len(SINGLES)


def test_an_error_ends_the_benchmark() -> None:
    frame = encode_failure(Failure("no room"), Dialect.SPEC)
    with pytest.raises(BenchFailed, match="no room"):
        TransactionMeter("t", VALUES).feed(bytearray(frame), len(frame))


def test_each_kind_of_request_has_its_target() -> None:
    targets = {workload.name: workload.target and workload.target.at_least for workload in workloads(10, 10, [2, 9_900], 1)}
    assert targets == {
        "PRODUCE to one topic": None,
        "PRODUCE to 2 topics in turn": 0.3,
        "PRODUCE to 9,900 topics in turn": 0.3,
        "COMMIT": 0.3,
        "PRODUCE_DELAYED": 0.3,
        "PRODUCE_WITH_TTL": 0.3,
        "transactions of 100": 0.7,
        "transactions of 1": 0.2,
    }


def test_the_command_reports_a_rate_and_a_ratio_for_each_kind(tmp_path: Path) -> None:
    report = measured("topics", "--records", "1200", "--topics", "2,30", directory=tmp_path)
    names = [figure["name"] for figure in report["figures"]]
    assert len(names) == 8 + 7
    for figure in report["figures"]:
        assert figure["value"] > 0
        assert ("target" in figure) is ("÷" in figure["name"])
