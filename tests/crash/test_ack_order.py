"""Order of system calls under strace: no ACK is sent before the fdatasync that covers it has returned."""

from __future__ import annotations

import contextlib
import struct
from pathlib import Path

import pytest

from tests.crash.peer import Peer, publish
from tests.crash.serving import SMALL, Broker, serving
from tests.crash.trace import Call, escaped, read_trace

RECORDS = 25
CALM = {**SMALL, "HEADRACE__STORAGE__CHECKPOINT_INTERVAL": "60s"}
"""Settings under which only the journal is synced during the test."""
WRITES = {"pwrite64", "pwritev", "pwritev2"}
SENDS = {"write", "writev", "sendto", "sendmsg"}


def value(number: int) -> bytes:
    return b"<record %04d>" % number


def ack(number: int) -> bytes:
    return struct.pack(">HHIQ", 6, 1, 8, number)


def tracer(trace: Path, *inject: str) -> list[str]:
    calls = "trace=fdatasync,fsync,pwritev,pwritev2,pwrite64," + ",".join(sorted(SENDS))
    return ["strace", "-f", "-v", "-y", "-xx", "-s", "512", "-qq", "-o", str(trace), "-e", calls, *inject]


def is_journal(call: Call) -> bool:
    return escaped(b".hrj") in call.arguments or ".hrj" in call.arguments


def first(calls: list[Call], wanted: set[str], content: bytes) -> Call:
    return next(call for call in calls if call.name in wanted and escaped(content) in call.arguments)


def test_an_ack_leaves_only_after_the_sync_that_covers_it(tmp_path: Path) -> None:
    trace = tmp_path / "trace"
    with serving(tmp_path, tracer=tracer(trace), settings=CALM) as broker:
        with Peer(broker.wait_ready()) as peer:
            for number in range(RECORDS):
                peer.send(publish("orders", number, value(number)))
                assert peer.acknowledged() == number
        assert broker.stop() == 0
    calls = read_trace(trace)
    for number in range(RECORDS):
        written = first(calls, WRITES, value(number))
        assert is_journal(written)
        sent = first(calls, SENDS, ack(number))
        covering = [
            call for call in calls if call.name == "fdatasync" and is_journal(call) and call.result == 0 and call.began > written.ended
        ]
        assert covering and covering[0].ended < sent.began, f"record {number}: ACK on line {sent.began}, sync {covering[:1]}"


def publish_until_refused(broker: Broker, records: int) -> int:
    """Return how many values were acknowledged before the broker returned an error."""
    acknowledged = 0
    with Peer(broker.wait_ready()) as peer, contextlib.suppress(OSError):
        for number in range(records):
            peer.send(publish("orders", number, value(number)))
            acknowledged += peer.acknowledged() == number
    return acknowledged


def refuses_to_publish(broker: Broker) -> bool:
    with Peer(broker.wait_ready()) as peer:
        try:
            peer.send(publish("orders", 999, value(999)))
            peer.acknowledged()
        except OSError:
            return True
    return False


@pytest.mark.parametrize("nth", [40, 60])
def test_after_a_failed_sync_nothing_is_acknowledged_and_nothing_synced_again(tmp_path: Path, nth: int) -> None:
    trace = tmp_path / "trace"
    inject = ("-e", f"inject=fdatasync:error=EIO:when={nth}")
    with serving(tmp_path, tracer=tracer(trace, *inject), settings=CALM) as broker:
        acknowledged = publish_until_refused(broker, 100)
        assert 0 < acknowledged < 100
        assert refuses_to_publish(broker)
        with Peer(broker.wait_ready()) as peer:
            assert peer.drain("orders") == [value(number) for number in range(acknowledged)], "reads go on"
        broker.stop()
    calls = read_trace(trace)
    (failed,) = [call for call in calls if call.name == "fdatasync" and call.result == -1]
    assert is_journal(failed)
    assert not [call for call in calls if call.name == "fdatasync" and call.began > failed.ended], "a sync is never tried twice"
    with serving(tmp_path, settings=CALM) as broker, Peer(broker.wait_ready()) as peer:
        kept = peer.drain("orders")
        assert kept[:acknowledged] == [value(number) for number in range(acknowledged)]
        assert len(kept) <= acknowledged + 2, "what was under way when the disk failed, and no more"


def test_a_full_disk_refuses_and_what_was_acknowledged_stays(tmp_path: Path) -> None:
    # No space for the next journal file: the first has the configured size, later ones cannot be allocated.
    inject = ("-e", "trace=fallocate", "-e", "inject=fallocate:error=ENOSPC:when=2+")
    command = ["strace", "-f", "-qq", "-o", "/dev/null", *inject]
    large = b"x" * 100_000
    with serving(tmp_path, tracer=command, settings=CALM) as broker:
        acknowledged = 0
        with Peer(broker.wait_ready()) as peer, contextlib.suppress(OSError):
            for number in range(200):
                peer.send(publish("orders", number, large))
                acknowledged += peer.acknowledged() == number
        assert 0 < acknowledged < 200
        with Peer(broker.wait_ready()) as peer:
            assert peer.drain("orders") == [large] * acknowledged
        broker.stop()
    with serving(tmp_path, settings=CALM) as broker, Peer(broker.wait_ready()) as peer:
        assert peer.drain("orders")[:acknowledged] == [large] * acknowledged
        peer.send(publish("orders", 0, b"there is room again"))
        assert peer.acknowledged() == 0
