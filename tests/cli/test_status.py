"""`headrace status`: one screen, for an administrator and for others."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import __version__
from tests.canaries import secret
from tests.server.process import BrokerProcess

ADMIN_PASSWORD = secret("status-admin-password")
USER_PASSWORD = secret("status-user-password")


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
        "broker", "health", "access", "engine", "disk", "loop lag", "listeners", "connections", "topics", "groups", "dead letters",
        "pipelines",
    ]  # fmt: skip
    lines = {line[:14].strip(): line[14:] for line in done.stdout.splitlines()}
    assert lines["broker"].startswith(f"headrace {__version__} at flymq://{status.address}, up ")
    assert (lines["health"], lines["access"]) == ("ok", "enforced, you are admin")
    assert lines["topics"].startswith("1 with 2 partitions, 2 records, ")
    assert "flymq 1" in lines["connections"]
    assert re.fullmatch(r"p50 \S+ ms, p99 \S+ ms, longest \S+ ms in the last minute; longest turn \S+ ms of CPU time", lines["loop lag"])
    assert lines["groups"].startswith("billing on orders: lag ")
    assert len(done.stdout.splitlines()) <= 24


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
