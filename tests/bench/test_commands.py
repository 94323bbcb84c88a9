"""Each command runs end to end with small sizes and reports plausible figures. Their size is not tested here."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import __version__
from tests.bench.commands import bench, measured, values


def test_publish_through_figg_reports_a_rate_and_its_machine(tmp_path: Path) -> None:
    report = measured("publish", "--protocol", "figg", "--records", "5000", "--connections", "3", directory=tmp_path)
    assert report["command"] == "publish"
    assert report["facts"]["headrace"] == __version__
    assert report["config"]["connections"] == 3
    assert values(report)["figg publish, durable, 3 connections"] > 100


@pytest.mark.parametrize("protocol", ["blipmq", "flymq", "rustlog"])
def test_every_protocol_can_be_filled_and_read(protocol: str, tmp_path: Path) -> None:
    report = measured("consume", "--protocol", protocol, "--records", "6210", directory=tmp_path)
    assert values(report)[f"{protocol} consume, history"] > 100


@pytest.mark.parametrize("protocol", ["flymq", "rustlog"])
def test_many_connections_are_measured_against_one(protocol: str, tmp_path: Path) -> None:
    sizes = ("--records", "3000", "--connections", "20", "--window", "2000", "--against-one")
    report = measured("benchmarks.variants", "--protocol", protocol, *sizes, directory=tmp_path)
    many, one, ratio = report["figures"]
    assert ratio["value"] == pytest.approx(many["value"] / one["value"])
    assert ratio["target"]["at_least"] == 0.7


def test_transactions_are_measured_against_plain_records(tmp_path: Path) -> None:
    report = measured(
        "benchmarks.variants", "--protocol", "flymq", "--records", "5030", "--transactions", "100", "--connections", "2", directory=tmp_path
    )
    plain, staged, windowed, ratio, fair = report["figures"]
    assert ratio["value"] == pytest.approx(staged["value"] / plain["value"])
    assert ratio["target"]["at_least"] == 0.7
    assert fair["value"] == pytest.approx(staged["value"] / windowed["value"])
    assert "target" not in fair


@pytest.mark.parametrize("protocol", ["flymq", "figg", "rustlog", "blipmq"])
def test_enforced_access_is_measured_against_open(protocol: str, tmp_path: Path) -> None:
    report = measured("benchmarks.variants", "--protocol", protocol, "--records", "3000", "--access", "enforced", directory=tmp_path)
    open_access, enforced, ratio = report["figures"]
    assert ratio["value"] == pytest.approx(enforced["value"] / open_access["value"])
    assert ratio["target"]["at_least"] == 0.95


@pytest.mark.parametrize("ack", ["written", "none"])
def test_weaker_acknowledgements_can_be_measured(ack: str, tmp_path: Path) -> None:
    report = measured("publish", "--records", "2000", "--window", "100", "--ack", ack, directory=tmp_path)
    assert list(values(report)) == [f"figg publish, {ack}"]


@pytest.mark.parametrize("protocol", ["figg", "blipmq", "flymq", "rustlog"])
def test_a_topic_that_was_filled_one_record_at_a_time_is_compared_with_one_filled_in_bulk(protocol: str, tmp_path: Path) -> None:
    report = measured("consume", "--protocol", protocol, "--records", "700", "--singles", directory=tmp_path)
    shown = values(report)
    assert shown[f"{protocol} consume, filled one at a time"] > 100
    assert shown[f"{protocol}: filled one at a time ÷ in bulk"] > 0
    (ratio,) = [figure for figure in report["figures"] if "÷" in figure["name"]]
    assert ratio["target"]["at_least"] == 0.5


def test_consume_through_figg_reports_a_rate(tmp_path: Path) -> None:
    report = measured("consume", "--protocol", "figg", "--records", "5000", "--connections", "2", "--size", "1 KiB", directory=tmp_path)
    assert values(report)["figg consume, history"] > 100


@pytest.mark.parametrize("protocol", ["figg", "blipmq", "flymq", "rustlog"])
def test_latency_reports_percentiles_in_order(protocol: str, tmp_path: Path) -> None:
    report = measured("latency", "--protocol", protocol, "--rate", "500", "--duration", "0.3", "--round-trips", "30", directory=tmp_path)
    loop, trips, machine, above = report["figures"]
    for figure in (loop, trips, machine):
        notes = figure["notes"]
        assert 0 < notes["p50"] <= notes["p90"] <= notes["p99"] <= notes["p99.9"] <= notes["p99.99"] <= notes["max"]
    assert above["value"] == pytest.approx(trips["value"] - machine["value"])


def test_latency_at_a_percentage_of_the_maximum_rate_has_a_target(tmp_path: Path) -> None:
    words = ("--size", "1MiB", "--load-percent", "50", "--duration", "0.2", "--round-trips", "5")
    loaded, commit, loop, *_ = measured("latency", "--protocol", "flymq", *words, directory=tmp_path)["figures"]
    assert loaded["name"] == "flymq open loop at 50 % of the maximum, durable"
    assert loaded["value"] > 0 and loaded["target"]["at_most"] == 15
    assert commit["name"] == "bare group commit of the same bytes" and 0 < commit["notes"]["p50"] <= commit["value"]
    assert loop["name"] == f"flymq open loop at {max(1, round(loaded['notes']['maximum records/s'] / 2))}/s, durable"


@pytest.mark.parametrize("words", [("--rate", "50"), ("--load-percent", "50"), ("--duration", "1")])
def test_an_option_of_the_open_loop_is_refused_over_quic(words: tuple[str, str], tmp_path: Path) -> None:
    done = bench("latency", "--protocol", "fujin", *words, directory=tmp_path)
    assert done.returncode == 2
    assert f"{words[0]} is for the open loop, which is not measured over QUIC" in done.stderr


@pytest.mark.parametrize(
    ("protocol", "operations"),
    [
        ("figg", ["publish", "fetch-1", "fetch-10", "fetch-500"]),
        ("blipmq", ["publish", "fetch-10", "fetch-500", "consume"]),
        ("flymq", ["publish", "fetch-1", "fetch-10", "fetch-500", "consume"]),
        ("rustlog", ["publish", "fetch-1", "fetch-10", "fetch-500"]),
        ("fujin", ["publish", "fetch-1", "fetch-10", "fetch-500"]),
    ],
)
def test_requests_are_measured_beside_a_bare_server(protocol: str, operations: list[str], tmp_path: Path) -> None:
    sizes = ("--connections", "2", "--duration", "0.02", "--records", "2000")
    report = measured("requests", "--protocol", protocol, *sizes, directory=tmp_path)
    figures = {figure["name"]: figure for figure in report["figures"]}
    for operation in operations:
        name = f"{protocol} {operation}, 2 {'streams' if protocol == 'fujin' else 'connections'}"
        bare = next(figure for other, figure in figures.items() if other.startswith(f"{name}: bare"))
        assert figures[f"{name} ÷ bare"]["value"] == pytest.approx(figures[name]["value"] / bare["value"])
        for notes in (figures[name]["notes"], bare["notes"]):
            assert 0 < notes["p50"] <= notes["p99"] <= notes["p99.9"]
    shown = {name.removeprefix(f"{protocol} ").partition(",")[0] for name in figures}
    assert shown == set(operations)


def test_small_clients_are_measured_beside_every_tenant(tmp_path: Path) -> None:
    sizes = ("--duration", "0.1", "--small-batches", "50", "--history", "5000", "--topics", "20")
    report = measured("interference", *sizes, directory=tmp_path)
    loop = [figure for figure in report["figures"] if figure["name"].startswith("loop ")]
    alone, _, *beside = [figure for figure in report["figures"] if figure not in loop]
    assert {figure["name"].partition(" beside")[0].removesuffix(" alone") for figure in loop} == {"loop lag", "loop turns"}
    assert [figure["name"] for figure in beside[::2]] == [
        f"publisher beside {tenant}" for tenant in ("small-batches", "flight-append", "figg-flood", "figg-history", "topic-list")
    ]
    for figure in beside:
        notes = figure["notes"]
        assert 0 < notes["p50"] <= figure["value"]
        assert notes["p99 ÷ control"] == pytest.approx(figure["value"] / notes["control p99"])
        assert figure["target"]["at_most"] == pytest.approx(2 * notes["control p99"] + report["facts"]["fdatasync_p50_ms"])
    assert "target" not in alone


def test_delayed_messages_are_measured_alone_and_under_load(tmp_path: Path) -> None:
    report = measured("benchmarks.delayed", "--messages", "20", "--rate", "200", "--delay", "200", directory=tmp_path)
    quiet, busy, machine = report["figures"]
    for figure in (quiet, busy, machine):
        assert 0 < figure["notes"]["p50"] <= figure["notes"]["max"]
        assert figure["value"] == pytest.approx(figure["notes"]["max"], rel=0.01)
    assert busy["target"]["at_most"] == 50


def test_compare_measures_nats_and_every_protocol(tmp_path: Path) -> None:
    report = measured("compare", "--against", "nats", "--records", "6000", directory=tmp_path)
    shown = values(report)
    for contender in ("headrace figg", "headrace blipmq", "headrace flymq", "headrace rustlog", "nats jetstream"):
        assert shown[f"{contender} publish"] > 100
        assert shown[f"{contender} consume{' with acks' if contender == 'headrace blipmq' else ''}"] > 100
    assert shown["nats jetstream consume with acks"] > 100
    assert shown["nats jetstream, nats-py publish"] > 100
    ratio = shown["publish: headrace figg ÷ nats jetstream"]
    assert ratio == pytest.approx(shown["headrace figg publish"] / shown["nats jetstream publish"])
    targets = {figure["name"]: figure["target"]["at_least"] for figure in report["figures"] if "target" in figure}
    assert targets == {
        "publish: headrace figg ÷ nats jetstream": 1.5,
        "publish: headrace blipmq ÷ nats jetstream": 1.5,
        "publish: headrace flymq ÷ nats jetstream": 1.0,
        "publish: headrace rustlog ÷ nats jetstream": 0.5,
        "consume: headrace figg ÷ nats jetstream": 2.0,
        "consume: headrace flymq ÷ nats jetstream": 2.0,
        "consume with acks: headrace blipmq ÷ nats jetstream": 1.0,
    }


def test_compare_measures_only_the_named_protocols(tmp_path: Path) -> None:
    report = measured("compare", "--protocols", "rustlog-json", "--records", "2000", directory=tmp_path)
    assert [name for name in values(report) if name.startswith("headrace")] == [
        "headrace rustlog-json publish",
        "headrace rustlog-json consume",
    ]


def test_a_running_broker_can_be_measured_and_keeps_running(tmp_path: Path) -> None:
    from headrace.bench.children import broker

    with broker(tmp_path) as running:
        work, key = tmp_path / "work", tmp_path / "key"
        work.mkdir()
        key.write_bytes(running.key)
        key.chmod(0o600)
        host, port = running.address
        server = ("--server", f"{host}:{port}", "--records", "1000")
        report = measured("publish", *server, directory=work)
        assert values(report)["figg publish, durable"] > 0
        report = measured("consume", "--protocol", "blipmq", "--blipmq-key", f"file:{key}", *server, directory=work)
        assert values(report)["blipmq consume, history"] > 0
        keyless = bench("publish", "--protocol", "blipmq", *server, directory=work)
        assert "blipmq needs an API key: --blipmq-key file:PATH" in keyless.stderr
        assert running.resident_bytes() > 0


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("compare", "--against", "redis"), 1, "redis-server is missing: apt-get install redis-server"),
        (("compare", "--against", "kafka"), 2, "'kafka' is none of nats, redis"),
        (("publish", "--server", "127.0.0.1:1", "--ack", "none"), 2, "--ack and --profile cannot be used with --server"),
        (("publish", "--server", "127.0.0.1:1"), 1, "cannot connect to 127.0.0.1:1: "),
        (("compare", "--protocols", "figg,kafka"), 2, "'kafka' is none of figg, blipmq, flymq, rustlog, rustlog-json"),
        (("publish", "--protocol", "rustlog", "--window", "499"), 1, "--window 499 is too small: rustlog publishes 500 records at once"),
        (("publish", "--blipmq-key", "env:KEY"), 2, "--blipmq-key needs --server"),
        (("publish", "--server", "127.0.0.1:1", "--blipmq-key", "env:NO_SUCH_KEY"), 1, "variable NO_SUCH_KEY is not set"),
        (("publish", "--server", "nowhere"), 1, "'nowhere' is not HOST:PORT"),
        (("publish", "--size", "0"), 2, "at least 1"),
        (("interference", "--tenants", "cat"), 2, "'cat' is none of small-batches, flight-append, figg-flood, figg-history, topic-list"),
        (("requests", "--connections", "1,x"), 2, "expected comma-separated numbers from 1 to 2000"),
        (("requests", "--operations", "poll"), 2, "'poll' is none of publish, fetch-1, fetch-10, fetch-500, consume"),
    ],
)
def test_an_impossible_measurement_fails_with_one_line(arguments: tuple[str, ...], code: int, line: str, tmp_path: Path) -> None:
    done = bench(*arguments, directory=tmp_path, path=str(tmp_path))
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert line in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("--against-one",), "--against-one needs --connections above 1"),
        (("--transactions", "100"), "--schema and --transactions are for --protocol flymq"),
        (("--protocol", "flymq", "--transactions", "9", "--schema", "json"), "use only one of --against-one, --schema, --transactions"),
        (("--access", "enforced", "--server", "127.0.0.1:1"), "--access cannot be used with --server"),
    ],
)
def test_variants_that_exclude_each_other_are_refused(arguments: tuple[str, ...], line: str, tmp_path: Path) -> None:
    done = bench("benchmarks.variants", *arguments, directory=tmp_path)
    assert done.returncode == 2
    assert line in done.stderr
