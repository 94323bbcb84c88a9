"""Figures of `bench interference`, and its tenants."""

from __future__ import annotations

from array import array
from dataclasses import replace
from pathlib import Path

import pytest

from headrace.bench import cli, traffic
from headrace.bench.children import BenchFailed
from headrace.bench.interference import Answers, Beside, Latencies, host
from headrace.bench.tenants import TENANTS, Place, Sizes, Work, running
from headrace.wire.flymq import Dialect, Opcode, encode_failure, encode_reply
from headrace.wire.flymq.messages import Failure, Fetched


def latencies(publisher: float, reader: float) -> Latencies:
    return Latencies(array("d", [publisher] * 10), array("d", [reader] * 10))


def test_the_target_is_twice_the_control_plus_one_fdatasync() -> None:
    beside = Beside("figg-flood", [latencies(0.021, 0.022)], [latencies(0.010, 0.010)])
    publisher, reader = beside.figures(fdatasync_ms=1.5)
    assert publisher.target is not None
    assert publisher.target.at_most == pytest.approx(21.5)
    assert (publisher.met, reader.met) == (True, False)
    assert publisher.notes["p99 ÷ control"] == pytest.approx(2.1)


def test_turns_of_the_loop_have_a_target_and_its_lag_has_none() -> None:
    counts = [980, 0, 10, 10, 0, 0, 0, 0, 0, 0, 0]
    run = replace(latencies(0.001, 0.001), lag=[0] * 10 + [5], turns=counts)
    lag, turns = Beside("figg-flood", [run], [run]).loop_figures()
    assert (lag.value, lag.met) == (1_000.0, None)
    assert (turns.value, turns.met, turns.notes) == (5.0, True, {"longest at most": 10.0})


def test_clients_alone_have_no_target() -> None:
    publisher, reader = Beside("none", [latencies(0.001, 0.002)]).figures(fdatasync_ms=1.0)
    assert (publisher.name, reader.name) == ("publisher alone", "reader alone")
    assert publisher.met is reader.met is None


def test_the_reader_counts_replies_and_fails_for_an_error() -> None:
    reply, meter = encode_reply(Opcode.FETCH, Fetched([0], [b"v"], 1)), Answers()
    meter.feed(bytearray(reply * 3), len(reply) * 3)
    assert meter.count == 3
    failed = encode_failure(Failure("no such topic"), Dialect.SPEC)
    with pytest.raises(BenchFailed, match="small reader"):
        meter.feed(bytearray(failed), len(failed))


def test_the_command_names_every_tenant() -> None:
    assert list(TENANTS) == cli.TENANTS


def test_a_tenant_that_ends_early_fails_the_benchmark(tmp_path: Path) -> None:
    with pytest.raises(BenchFailed, match="figg-history ended early: .*cannot connect"):
        with running("figg-history", Place(("127.0.0.1", 1)), Work("t", 1), tmp_path) as process:
            process.wait(60)


def test_small_batches_are_filled_one_record_at_a_time(tmp_path: Path) -> None:
    with host(tmp_path / "broker", flight=False) as first:
        work = TENANTS["small-batches"].prepare(first.place, Sizes(small_batches=25, history=1, topics=1))
        assert work.records == 25
        plan = first.place.plan("flymq", 25)
        assert traffic.consume(plan, traffic.BenchTopic(work.topic, [0])) > 0
