"""Each command runs end to end with tiny sizes and reports figures that can be true. How large they are is not tested here."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace import __version__
from tests.bench.commands import bench, measured, values


def test_publish_through_figg_reports_a_rate_and_its_machine(tmp_path: Path) -> None:
    told = measured("publish", "--protocol", "figg", "--records", "5000", "--connections", "3", directory=tmp_path)
    assert told["command"] == "publish"
    assert told["facts"]["headrace"] == __version__
    assert told["config"]["connections"] == 3
    assert values(told)["figg publish, durable, 3 connections"] > 100


@pytest.mark.parametrize("protocol", ["blipmq", "flymq", "rustlog"])
def test_every_protocol_can_be_filled_and_read(protocol: str, tmp_path: Path) -> None:
    told = measured("consume", "--protocol", protocol, "--records", "6210", directory=tmp_path)
    assert values(told)[f"{protocol} consume, history"] > 100


@pytest.mark.parametrize("protocol", ["flymq", "rustlog"])
def test_many_connections_are_measured_against_one(protocol: str, tmp_path: Path) -> None:
    sizes = ("--records", "3000", "--connections", "20", "--window", "2000", "--against-one")
    told = measured("publish", "--protocol", protocol, *sizes, directory=tmp_path)
    many, one, ratio = told["figures"]
    assert ratio["value"] == pytest.approx(many["value"] / one["value"])
    assert ratio["target"]["at_least"] == 0.7


def test_transactions_are_measured_against_plain_records(tmp_path: Path) -> None:
    told = measured(
        "publish", "--protocol", "flymq", "--records", "5030", "--transactions", "100", "--connections", "2", directory=tmp_path
    )
    plain, staged, windowed, ratio, fair = told["figures"]
    assert ratio["value"] == pytest.approx(staged["value"] / plain["value"])
    assert ratio["target"]["at_least"] == 0.7
    assert fair["value"] == pytest.approx(staged["value"] / windowed["value"])
    assert "target" not in fair


@pytest.mark.parametrize("protocol", ["flymq", "figg", "rustlog", "blipmq"])
def test_enforced_access_is_measured_against_open(protocol: str, tmp_path: Path) -> None:
    told = measured("publish", "--protocol", protocol, "--records", "3000", "--access", "enforced", directory=tmp_path)
    free, guarded, ratio = told["figures"]
    assert ratio["value"] == pytest.approx(guarded["value"] / free["value"])
    assert ratio["target"]["at_least"] == 0.95


@pytest.mark.parametrize("ack", ["written", "none"])
def test_a_weaker_promise_can_be_measured_too(ack: str, tmp_path: Path) -> None:
    told = measured("publish", "--records", "2000", "--window", "100", "--ack", ack, directory=tmp_path)
    assert list(values(told)) == [f"figg publish, {ack}"]


def test_consume_through_figg_reports_a_rate(tmp_path: Path) -> None:
    told = measured("consume", "--protocol", "figg", "--records", "5000", "--connections", "2", "--size", "1 KiB", directory=tmp_path)
    assert values(told)["figg consume, history"] > 100


@pytest.mark.parametrize("protocol", ["figg", "blipmq", "flymq", "rustlog"])
def test_latency_reports_percentiles_in_order(protocol: str, tmp_path: Path) -> None:
    told = measured("latency", "--protocol", protocol, "--rate", "500", "--duration", "0.3", "--round-trips", "30", directory=tmp_path)
    loop, trips, machine, above = told["figures"]
    for figure in (loop, trips, machine):
        notes = figure["notes"]
        assert 0 < notes["p50"] <= notes["p90"] <= notes["p99"] <= notes["p99.9"] <= notes["p99.99"] <= notes["max"]
    assert above["value"] == pytest.approx(trips["value"] - machine["value"])


def test_delayed_messages_are_measured_alone_and_under_load(tmp_path: Path) -> None:
    told = measured("delayed", "--messages", "20", "--rate", "200", "--delay", "200", directory=tmp_path)
    quiet, busy, machine = told["figures"]
    for figure in (quiet, busy, machine):
        assert 0 < figure["notes"]["p50"] <= figure["notes"]["max"]
        assert figure["value"] == pytest.approx(figure["notes"]["max"], rel=0.01)
    assert busy["target"]["at_most"] == 50


def test_log_reports_every_part(tmp_path: Path) -> None:
    sizes = ("--records", "5000", "--run", "100", "--log-size", "3 MiB", "--partitions", "10")
    told = measured("log", *sizes, directory=tmp_path)
    shown = values(told)
    for name in (
        "append, durable, runs of 100",
        "append as columns, durable, runs of 10,485",
        "read as columns",
        "read as values",
        "raw: memcpy",
    ):
        assert shown[name] > 0
    assert 0 < shown["recovery, 1 partition"] < 60
    assert 0 < shown["recovery, 10 partitions"] < 60
    assert 0 < shown["flush to 10 partitions, 1 record each ÷ to one"] < 100
    assert 10 < shown["idle memory, 10 partitions"] < 1_000


def test_only_the_named_parts_of_the_log_are_measured(tmp_path: Path) -> None:
    told = measured("log", "--only", "spread", "--partitions", "5", directory=tmp_path)
    assert list(values(told)) == [
        "flush to 5 partitions, 1 record each ÷ to one",
        "flush to 5 partitions, 10 records each ÷ to one",
    ]


def test_compare_puts_nats_beside_every_protocol(tmp_path: Path) -> None:
    told = measured("compare", "--against", "nats", "--records", "6000", directory=tmp_path)
    shown = values(told)
    for contender in ("headrace figg", "headrace blipmq", "headrace flymq", "headrace rustlog", "nats jetstream"):
        assert shown[f"{contender} publish"] > 100
        assert shown[f"{contender} consume"] > 100
    assert shown["nats jetstream, nats-py publish"] > 100
    ratio = shown["publish: headrace figg ÷ nats jetstream"]
    assert ratio == pytest.approx(shown["headrace figg publish"] / shown["nats jetstream publish"])
    targets = {figure["name"]: figure["target"]["at_least"] for figure in told["figures"] if "target" in figure}
    assert targets == {
        "publish: headrace figg ÷ nats jetstream": 1.5,
        "publish: headrace blipmq ÷ nats jetstream": 1.5,
        "publish: headrace flymq ÷ nats jetstream": 1.0,
        "publish: headrace rustlog ÷ nats jetstream": 0.5,
        "consume: headrace figg ÷ nats jetstream": 2.0,
        "consume: headrace flymq ÷ nats jetstream": 2.0,
    }


def test_compare_measures_only_the_named_protocols(tmp_path: Path) -> None:
    told = measured("compare", "--protocol", "rustlog-json", "--records", "2000", directory=tmp_path)
    assert [name for name in values(told) if name.startswith("headrace")] == [
        "headrace rustlog-json publish",
        "headrace rustlog-json consume",
    ]


def test_the_table_goes_to_stdout(tmp_path: Path) -> None:
    done = bench("log", "--only", "raw", "--run", "10", "--repeat", "2", directory=tmp_path)
    assert done.returncode == 0, done.stderr
    assert "raw: memcpy" in done.stdout
    assert "fdatasync p50" in done.stdout


def test_a_running_broker_can_be_measured_and_keeps_running(tmp_path: Path) -> None:
    from headrace.bench.children import broker

    with broker(tmp_path) as running:
        work, key = tmp_path / "work", tmp_path / "key"
        work.mkdir()
        key.write_bytes(running.key)
        key.chmod(0o600)
        host, port = running.address
        server = ("--server", f"{host}:{port}", "--records", "1000")
        told = measured("publish", *server, directory=work)
        assert values(told)["figg publish, durable"] > 0
        told = measured("consume", "--protocol", "blipmq", "--blipmq-key", f"file:{key}", *server, directory=work)
        assert values(told)["blipmq consume, history"] > 0
        keyless = bench("publish", "--protocol", "blipmq", *server, directory=work)
        assert "blipmq asks for an API key: --blipmq-key file:PATH" in keyless.stderr
        assert running.resident_bytes() > 0


@pytest.mark.parametrize(
    ("arguments", "code", "line"),
    [
        (("compare", "--against", "redis"), 1, "redis-server is missing: apt-get install redis-server"),
        (("compare", "--against", "kafka"), 2, "'kafka' is none of nats, redis"),
        (("publish", "--server", "127.0.0.1:1", "--ack", "none"), 2, "--ack and --profile need a broker that is started here"),
        (("publish", "--server", "127.0.0.1:1"), 1, "127.0.0.1:1 refuses the connection"),
        (("compare", "--protocol", "figg,kafka"), 2, "'kafka' is none of figg, blipmq, flymq, rustlog, rustlog-json"),
        (("publish", "--protocol", "rustlog", "--window", "499"), 1, "rustlog publishes 500 records at once: the window is too small"),
        (("publish", "--against-one"), 2, "--against-one needs --connections above 1"),
        (("publish", "--transactions", "100"), 2, "--schema and --transactions are for --protocol flymq"),
        (
            ("publish", "--protocol", "flymq", "--transactions", "9", "--schema", "json"),
            2,
            "one of --against-one, --schema, --transactions",
        ),
        (("publish", "--access", "enforced", "--server", "127.0.0.1:1"), 2, "--access needs a broker that is started here"),
        (("publish", "--blipmq-key", "env:KEY"), 2, "--blipmq-key is for --server"),
        (("publish", "--server", "127.0.0.1:1", "--blipmq-key", "env:NO_SUCH_KEY"), 1, "variable NO_SUCH_KEY is not set"),
        (("publish", "--server", "nowhere"), 1, "'nowhere' is not HOST:PORT"),
        (("publish", "--size", "0"), 2, "at least 1"),
    ],
)
def test_what_cannot_be_measured_is_said_in_one_line(arguments: tuple[str, ...], code: int, line: str, tmp_path: Path) -> None:
    done = bench(*arguments, directory=tmp_path, path=str(tmp_path))
    assert done.returncode == code
    assert len(done.stderr.splitlines()) == 1
    assert line in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_bulk_is_measured_against_a_bare_server(tmp_path: Path) -> None:
    told = measured("flight", "--rows", "20000", "--batch", "3000", directory=tmp_path)
    read, bare_read, read_share, append, bare_append, append_share = told["figures"]
    assert read_share["value"] == pytest.approx(read["value"] / bare_read["value"])
    assert append_share["value"] == pytest.approx(append["value"] / bare_append["value"])
    assert (read["target"]["at_least"], append["target"]["at_least"]) == (5_000_000, 3_000_000)
    assert read_share["target"]["at_least"] == append_share["target"]["at_least"] == 0.5
