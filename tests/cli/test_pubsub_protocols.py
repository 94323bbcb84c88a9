"""`headrace pub`, `sub` and `fetch` through every protocol of a real broker."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from datetime import UTC, datetime
from itertools import count
from pathlib import Path

import pytest

import headrace
from headrace.cli.rows import moment
from headrace.server import certificates
from tests.protocols.peers import API_KEY, PEERS, Broker, Peer, serving

WAIT_SECONDS = 300
NAMES = count()
peers = pytest.mark.parametrize("peer", PEERS, ids=str)


@pytest.fixture(scope="module")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Broker]:
    with serving(tmp_path_factory.mktemp("commands")) as broker:
        yield broker


@pytest.fixture
def topic() -> str:
    return f"demo-{next(NAMES)}"


def environment(broker: Broker | None, **more: str) -> dict[str, str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")}
    address = {} if broker is None else {"HEADRACE_SERVER": broker.address, "HEADRACE_API_KEY": "env:SECRET", "SECRET": API_KEY}
    return {**inherited, **address, **more}


def run(broker: Broker | None, *arguments: str, given: bytes = b"", **more: str) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-m", "headrace", *arguments]
    return subprocess.run(command, input=given, capture_output=True, timeout=WAIT_SECONDS, env=environment(broker, **more), check=False)


def done(ended: subprocess.CompletedProcess[bytes]) -> bytes:
    assert ended.returncode == 0, ended.stderr
    return ended.stdout


def refused(ended: subprocess.CompletedProcess[bytes], code: int) -> str:
    assert (ended.returncode, ended.stdout) == (code, b""), ended.stderr
    [line] = ended.stderr.decode().splitlines()
    return line


def through(peer: Peer | str) -> list[str]:
    return ["--protocol", str(peer)]


def created(broker: Broker, topic: str, partitions: int = 1) -> None:
    with headrace.sync.connect(f"flymq://{broker.address}") as client:
        client.create_topic(topic, partitions=partitions)


@peers
def test_lines_published_through_a_protocol_are_fetched_through_another(broker: Broker, topic: str, peer: Peer) -> None:
    created(broker, topic)
    published = run(broker, "pub", topic, *through(peer), given=b"one\n\n\xff\xfe\n")
    assert published.stderr.decode().startswith(f"{topic}: 3 records acknowledged in ")
    assert done(run(broker, "fetch", topic, *through("rustlog"))) == b"one\n\n\xff\xfe\n"


@peers
def test_a_topic_is_followed_through_a_protocol_as_objects(broker: Broker, topic: str, peer: Peer) -> None:
    created(broker, topic)
    start = ["--from", "earliest"] if peer.reads_history else []
    with subprocess.Popen(
        [sys.executable, "-m", "headrace", "sub", topic, "-n", "2", "-o", "json", *start, *through(peer)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        env=environment(broker),
    ) as process:
        try:
            with headrace.sync.connect(f"flymq://{broker.address}") as client:
                # A protocol without history must subscribe first: publish until the first record arrives.
                out = None
                while out is None:
                    client.publish(topic, b'{"id": 1}', key=b"k")
                    try:
                        out, errors = process.communicate(timeout=0.5)
                    except subprocess.TimeoutExpired:
                        pass
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, b"")
    rows = [json.loads(line) for line in out.splitlines()]
    assert [row["value"] for row in rows] == [{"id": 1}] * 2
    assert [row["offset"] for row in rows] == ([0, 1] if peer.reads_offsets else [None, None])
    assert {row["key"] for row in rows} == {"k" if peer.reads_keys else None}


def test_receipts_are_printed_if_the_protocol_reports_them(broker: Broker, topic: str) -> None:
    published = run(broker, "pub", topic, "hello", "--key", "k", *through("flymq"))
    assert published.stderr.decode().startswith(f"{topic}[0]@0: 1 record acknowledged in ")
    [row] = [json.loads(line) for line in done(run(broker, "pub", topic, "again", "-o", "json", *through("rustlog"))).splitlines()]
    assert row == {"topic": topic, "partition": 0, "offset": 1, "timestamp": None}


def test_what_a_group_was_printed_is_committed_and_no_more(broker: Broker, topic: str) -> None:
    done(run(broker, "pub", topic, *through("flymq"), given=b"a\nb\nc\nd\n"))
    for protocol, wanted in (("flymq", b"a\nb\n"), ("rustlog", b"c\n")):
        arguments = ["sub", topic, "--group", "g", "--from", "earliest", "-n", str(wanted.count(b"\n")), *through(protocol)]
        assert done(run(broker, *arguments)) == wanted
    assert done(run(broker, "fetch", topic, "--group", "g", *through("flymq"))) == b"d\n"


async def test_an_interrupt_commits_what_was_printed(broker: Broker, topic: str) -> None:
    done(run(broker, "pub", topic, *through("flymq"), given=b"a\nb\n"))
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "headrace", "sub", topic, "--group", "g", "--from", "earliest", *through("flymq")),
        stdout=asyncio.subprocess.PIPE,
        env=environment(broker),
    )
    assert process.stdout is not None
    async with asyncio.timeout(WAIT_SECONDS):
        assert await process.stdout.readexactly(4) == b"a\nb\n"
        process.send_signal(signal.SIGINT)
        assert await process.wait() == 130
    async with broker.connect("rustlog") as client:
        assert await client.committed(topic, group="g") == 2


def test_fetched_records_are_printed_in_the_chosen_format(broker: Broker, topic: str) -> None:
    done(run(broker, "pub", topic, "x", "--key", "k\x1b", *through("flymq")))
    done(run(broker, "pub", topic, *through("flymq"), given=b"\xff\n"))
    fetch = ["fetch", topic, *through("flymq"), "-o"]
    rows = json.loads(done(run(broker, *fetch, "json")))
    times = [row.pop("timestamp") for row in rows]
    assert all(isinstance(time, int) for time in times)
    assert rows == [
        {"topic": topic, "partition": 0, "offset": 0, "key": "k\x1b", "headers": [], "value": "x"},
        {"topic": topic, "partition": 0, "offset": 1, "key": None, "headers": [], "value": "/w==", "encoding": "base64"},
    ]
    assert len(done(run(broker, *fetch, "jsonl")).splitlines()) == 2
    assert done(run(broker, *fetch, "hex")) == b"78\nff\n"
    table = [line.split() for line in done(run(broker, *fetch, "table")).decode().splitlines()]
    assert table == [
        ["TOPIC", "PARTITION", "OFFSET", "TIME", "KEY", "VALUE"],
        [topic, "0", "0", moment(times[0]), "k\\x1b", "x"],
        [topic, "0", "1", moment(times[1]), "-", "\\xff"],
    ]
    assert done(run(broker, *fetch, "raw", "--from", "1", "-n", "1")) == b"\xff\n"


def test_an_empty_fetch_is_nothing_and_no_failure(broker: Broker, topic: str) -> None:
    created(broker, topic)
    assert done(run(broker, "fetch", topic, *through("flymq"))) == b""
    assert done(run(broker, "fetch", topic, "-o", "json", *through("flymq"))) == b"[]\n"


def test_more_records_than_one_reply_holds_are_fetched_in_order(broker: Broker, topic: str) -> None:
    lines = b"".join(b"%06d%s\n" % (number, b"." * 994) for number in range(12_000))
    done(run(broker, "pub", topic, *through("flymq"), given=lines))
    assert done(run(broker, "fetch", topic, "-n", "11000", *through("flymq"))) == lines[: 11_000 * 1001]


def test_a_time_is_looked_up_where_the_protocol_can(broker: Broker, topic: str) -> None:
    done(run(broker, "pub", topic, "old", *through("flymq")))
    for time in ("1h", "2020-01-01", "2020-01-01T12:00:00Z"):
        assert done(run(broker, "fetch", topic, "--from", time, *through("flymq"))) == b"old\n"
    assert done(run(broker, "fetch", topic, "--from", "2120-01-01", *through("flymq"))) == b""


def test_partitions_are_chosen(broker: Broker, topic: str) -> None:
    created(broker, topic, partitions=3)
    done(run(broker, "pub", topic, "x", "--partition", "2", *through("rustlog")))
    assert done(run(broker, "fetch", topic, "--partition", "2", *through("flymq"))) == b"x\n"
    assert done(run(broker, "fetch", topic, "--partition", "1", *through("flymq"))) == b""
    assert "has no partition 7" in refused(run(broker, "fetch", topic, "--partition", "7", *through("flymq")), 3)


def test_a_url_names_the_protocol(broker: Broker, topic: str) -> None:
    url = f"flymq://{broker.address}"
    done(run(None, "pub", topic, "x", "--server", url))
    assert done(run(None, "fetch", topic, HEADRACE_SERVER=url)) == b"x\n"
    assert "figg contradicts the protocol flymq" in refused(run(None, "fetch", topic, "--protocol", "figg", HEADRACE_SERVER=url), 2)


def test_a_key_comes_from_a_file_or_a_variable_or_with_a_warning(broker: Broker, topic: str, tmp_path: Path) -> None:
    created(broker, topic)
    command = ["pub", topic, "x", "--server", f"blipmq://{broker.address}", "--api-key"]
    file = tmp_path / "key"
    file.write_text(f"{API_KEY}\n")
    file.chmod(0o644)
    assert "chmod 600" in refused(run(None, *command, f"file:{file}"), 1)
    file.chmod(0o600)
    done(run(None, *command, f"file:{file}"))
    assert "KEY is not set" in refused(run(None, *command, "env:KEY"), 1)
    assert b"other users" in run(None, *command, "open-to-all-eyes").stderr
    assert b"other users" not in run(None, *command[:-1], HEADRACE_API_KEY=API_KEY).stderr
    assert "invalid API key" in refused(run(None, *command[:-1], "-q", HEADRACE_API_KEY="wrong"), 4)
    assert "blipmq:// needs an API key: give api_key (on the command line: --api-key)" in refused(run(None, *command[:-1]), 2)


def test_a_protocol_that_has_no_offsets_goes_on_behind_what_was_printed(broker: Broker, topic: str) -> None:
    protocols = broker.process.ready["protocols"]
    assert isinstance(protocols, dict)
    url = f"fujin://{protocols['quic'][0]}"
    done(run(broker, "pub", topic, *through("flymq"), given=b"a\nb\nc\nd\n"))
    assert done(run(None, "fetch", topic, "-n", "2", "--server", url)) == b"a\nb\n"
    assert done(run(None, "sub", topic, "-n", "1", "-o", "jsonl", "--server", url)).startswith(b'{"topic":"%s"' % topic.encode())
    assert done(run(None, "fetch", topic, "--server", url)) == b"d\n"


@pytest.mark.parametrize(
    "arguments, complaint",
    [
        (["fetch", "t", "--protocol", "figg"], "the figg protocol does not support fetch; use --protocol "),
        (["fetch", "t", "--protocol", "blipmq"], "the blipmq protocol does not support fetch; use --protocol "),
        (["pub", "t", "x", "--key", "k", "--protocol", "figg"], "Figg does not support keys; flymq:// has"),
        (["pub", "t", "x", "--partition", "1", "--protocol", "blipmq"], "BlipMQ does not support partitions"),
        (["sub", "t", "--group", "g", "--protocol", "figg"], "Figg does not support groups; flymq:// and rustlog:// do"),
        (["sub", "t", "--from", "earliest", "--protocol", "blipmq"], "BlipMQ does not support reading what was published before"),
        (["pub", "t", "x", "--api-key", "env:SECRET", "--protocol", "figg"], "Figg does not support API keys"),
        (["sub", "t", "--from", "5m", "--protocol", "rustlog"], "the rustlog protocol does not support times"),
    ],
)
def test_what_a_protocol_cannot_do_is_one_line_that_says_what_can(broker: Broker, arguments: list[str], complaint: str) -> None:
    assert complaint in refused(run(broker, *arguments), 2)


@pytest.mark.parametrize("protocol", ["figg", "rustlog", "blipmq", "flymq"])
def test_a_server_that_speaks_something_else_is_one_line(tmp_path: Path, protocol: str) -> None:
    other = "figg" if protocol != "figg" else "flymq"
    with serving(tmp_path, "--listen", f"127.0.0.1:0={other}") as broker:
        line = refused(run(broker, "sub", "t", *through(protocol)), 5)
    assert line.startswith(f"headrace: cannot connect to {broker.address}: ")


def test_tls_needs_no_more_than_the_authority(tmp_path: Path, topic: str) -> None:
    certificates.init(tmp_path / "certs", ("localhost",), datetime.now(UTC))
    ca = str(tmp_path / "certs" / "ca.pem")
    settings = [f"tls.certificate={tmp_path / 'certs' / 'server.pem'}", f"tls.key={tmp_path / 'certs' / 'server.key'}"]
    with serving(tmp_path, *(word for setting in settings for word in ("--set", setting))) as broker:
        port = broker.address.rpartition(":")[2]
        done(run(None, "pub", topic, "sealed", "--server", f"flymq+tls://localhost:{port}", "--tls-ca", ca))
        assert done(run(None, "fetch", topic, "--server", f"localhost:{port}", "--protocol", "rustlog", "--tls-ca", ca)) == b"sealed\n"
        untrusted = refused(run(None, "fetch", topic, "--server", f"localhost:{port}", "--protocol", "flymq", "--tls"), 5)
        assert "is not trusted" in untrusted and "--tls-ca" in untrusted
        assert refused(run(None, "fetch", topic, "--server", f"localhost:{port}"), 5).endswith("of the URL, or give --tls")
