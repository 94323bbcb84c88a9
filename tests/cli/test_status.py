"""`headrace status`: one screen, for an administrator and for others."""

from __future__ import annotations

import contextlib
import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import msgspec
import pytest
from rich.console import Console

from headrace import __version__
from headrace.cli.status import _PROMISES, _promises
from headrace.cli.top import screen
from headrace.engine.kafka.engine import KafkaEngine
from headrace.overview import Overview
from tests.canaries import secret
from tests.server.process import BrokerProcess

ADMIN_PASSWORD = secret("status-admin-password")
USER_PASSWORD = secret("status-user-password")
EMPTY = {
    "principal": "ann",
    "access": "open",
    "version": "1",
    "uptime_ms": 1,
    "time_ms": 1,
    "started_at_ms": 0,
    "health": {"state": "ok", "problems": []},
    "topics": {"count": 0, "partitions": 0, "records": 0, "size_bytes": 0},
    "groups": [],
    "groups_count": 0,
    "lag": 0,
    "dead_letters": [],
    "delayed": 0,
    "traffic": {},
    "warnings": [],
    "server": None,
}


class Status:
    def __init__(self, directory: Path, broker: BrokerProcess) -> None:
        self.directory, self.broker = directory, broker
        host, port = broker.addresses[0]
        self.address = f"{host}:{port}"

    def file(self, text: str) -> str:
        path = self.directory / f"password-{abs(hash(text))}"
        path.touch(0o600)
        path.write_text(text)
        return str(path)

    def run(self, *arguments: str, user: str = "admin", password: str = ADMIN_PASSWORD) -> subprocess.CompletedProcess[str]:
        environment = {**os.environ, "HEADRACE_SERVER": self.address, "HEADRACE_PIPELINES": str(self.directory / "none")}
        if user:
            environment |= {"HEADRACE_USER": user, "HEADRACE_PASSWORD_FILE": self.file(password)}
        command = [sys.executable, "-m", "headrace", *arguments]
        return subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120, check=False)


@pytest.fixture(scope="module")
def status(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Status]:
    directory = tmp_path_factory.mktemp("status")
    password = directory / "admin-password"
    password.touch(0o600)
    password.write_text(ADMIN_PASSWORD)
    settings = ("--set", "access.mode=enforced", "--set", f"access.admin_password_file={password}")
    with BrokerProcess(directory, *settings) as broker:
        status = Status(directory, broker)
        status.run("topic", "create", "orders", "--partitions", "2", "-q")
        status.run("pub", "orders", "a", "b", "-q")
        status.run("sub", "orders", "--from", "earliest", "-n", "1", "--group", "billing")
        status.run("user", "create", "ann", "--new-password-file", status.file(USER_PASSWORD), "-q")
        yield status


def test_an_administrator_sees_everything_on_one_screen(status: Status) -> None:
    done = status.run("status")
    assert done.returncode == 0, done.stderr
    titles = [line[:14].strip() for line in done.stdout.splitlines()]
    assert [title for title in titles if title] == [
        "broker", "health", "access", "engine", "promises", "disk", "loop lag", "listeners", "connections", "topics", "groups",
        "dead letters", "pipelines",
    ]  # fmt: skip
    lines = {line[:14].strip(): line[14:] for line in done.stdout.splitlines()}
    assert lines["broker"].startswith(f"headrace {__version__} at flymq://{status.address}, up ")
    assert (lines["health"], lines["access"]) == ("ok", "enforced, you are admin")
    assert lines["promises"].startswith("a durable append is synced to disk, offsets without gaps, ")
    assert lines["promises"].endswith("keys placed by fnv1a")
    assert lines["topics"].startswith("1 with 2 partitions, 2 records, ")
    assert "flymq 1" in lines["connections"]
    assert re.fullmatch(r"p50 \S+ ms, p99 \S+ ms, longest \S+ ms in the last minute; longest turn \S+ ms of CPU time", lines["loop lag"])
    assert lines["groups"].startswith("billing on orders: lag ")
    assert len(done.stdout.splitlines()) <= 24


def test_the_promises_of_kafka_are_named() -> None:
    promises = list(_promises(asdict(KafkaEngine.capabilities)))
    assert "offsets with gaps" in promises and "compaction when the log likes" in promises and promises[-1] == "keys placed by murmur2"
    assert _PROMISES.keys() < asdict(KafkaEngine.capabilities).keys()


def test_json_has_the_same_facts(status: Status) -> None:
    found = json.loads(status.run("status", "-o", "json").stdout)
    assert (found["version"], found["health"]["state"], found["principal"]) == (__version__, "ok", "admin")
    assert found["server"]["data"] == str(status.broker.data) and found["server"]["disk"]["free_bytes"] > 0
    assert sum(found["server"]["loop_lag"]["counts"]) > 0
    assert [listener["kind"] for listener in found["server"]["listeners"]].count("tcp") >= 1
    assert found["topics"]["records"] == 2 and found["pipelines"] == []


def test_a_user_without_rights_sees_no_more_than_the_health(status: Status) -> None:
    done = status.run("status", user="ann", password=USER_PASSWORD)
    assert done.returncode == 0, done.stderr
    assert "you are ann" in done.stdout and "listeners" not in done.stdout and "orders" not in done.stdout


def test_nothing_is_visible_without_a_login(status: Status) -> None:
    done = status.run("status", user="")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "headrace: nothing is visible to anonymous: log in with --user or --api-key\n"


def test_top_shows_one_screen_with_rates_when_it_is_not_live(status: Status) -> None:
    done = status.run("top", "--once", "--interval", "100ms")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"headrace {__version__} at flymq://{status.address}, up ") and "you are admin" in done.stdout
    titles = ["protocol", "connections", "in/s", "in", "B/s", "out/s", "out", "B/s", "in", "out"]
    assert titles in [line.split() for line in done.stdout.splitlines()]
    assert any(line.split()[:2] == ["billing", "orders"] for line in done.stdout.splitlines())


def test_top_prints_the_overview_with_rates_as_json(status: Status) -> None:
    done = status.run("top", "--once", "--json", "--interval", "100ms")
    (line,) = done.stdout.splitlines()
    found = json.loads(line)
    rates = found.pop("rates")
    overview = msgspec.convert(found, Overview)
    assert overview.traffic["flymq"].published_records == 2 and rates["all"]["published_records"] == 0.0


def test_top_is_an_error_without_a_login(status: Status) -> None:
    done = status.run("top", "--once", user="")
    assert (done.returncode, done.stdout) == (4, "")
    assert done.stderr == "headrace: nothing is visible to anonymous: log in with --user or --api-key\n"


def test_names_on_the_screen_of_top_are_harmless() -> None:
    overview = msgspec.convert({**EMPTY, "groups": [{"group": "[red]g\x1b[2J", "topic": "t\u202e", "lag": 1}]}, Overview)
    console = Console(file=io.StringIO(), width=100, force_terminal=False)
    console.print(screen(overview, None, "flymq://127.0.0.1:9092", "no answer: \x1b]0;x\x07"))
    text = console.file.getvalue()  # type: ignore[attr-defined]
    assert "[red]g" in text and "\x1b" not in text and "\u202e" not in text and "\x07" not in text


@pytest.mark.parametrize("key", ["q", "\x03"])
def test_the_live_screen_ends_with_a_key(status: Status, key: str) -> None:
    process, terminal = pty.fork()
    if not process:
        environment = {**os.environ, "HEADRACE_SERVER": status.address, "HEADRACE_USER": "admin", "TERM": "xterm"}
        environment["HEADRACE_PASSWORD_FILE"] = status.file(ADMIN_PASSWORD)
        os.execve(sys.executable, [sys.executable, "-m", "headrace", "top", "--interval", "200ms"], environment)
    shown = b""
    while b"protocol" not in shown:
        shown += os.read(terminal, 4096)
    os.write(terminal, key.encode())
    with contextlib.suppress(OSError):  # the other side is closed
        while os.read(terminal, 4096):
            pass
    _, code = os.waitpid(process, 0)
    os.close(terminal)
    assert os.waitstatus_to_exitcode(code) == 0
