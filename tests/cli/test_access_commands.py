"""`headrace user|acl|key|audit` against a broker that enforces access, without leaking secrets."""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.canaries import secret, shows
from tests.server.process import BrokerProcess

ADMIN_PASSWORD = secret("admin-password")
ANN_PASSWORD = secret("ann-password")
SECOND_PASSWORD = secret("second-password")
ENFORCED = ("--set", "access.mode=enforced")


class Admin:
    """Runs commands, logged in or not."""

    def __init__(self, directory: Path, broker: BrokerProcess) -> None:
        self.directory, self.broker = directory, broker
        host, port = broker.addresses[0]
        self._server = f"{host}:{port}"

    def run(
        self, *arguments: str, user: str = "admin", password: str = ADMIN_PASSWORD, stdin: str = ""
    ) -> subprocess.CompletedProcess[str]:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")}
        if user:
            environment |= {"HEADRACE_USER": user, "HEADRACE_PASSWORD_FILE": str(self.secret(password))}
        return subprocess.run(
            [sys.executable, "-m", "headrace", *arguments, "--server", self._server],
            input=stdin,
            capture_output=True,
            text=True,
            env=environment,
            timeout=300,
            check=False,
        )

    def rows(self, *arguments: str, **login: str) -> list[dict[str, object]]:
        done = self.run(*arguments, "-o", "json", **login)
        assert done.returncode == 0, done.stderr
        rows: list[dict[str, object]] = json.loads(done.stdout)
        return rows

    def secret(self, text: str) -> Path:
        path = self.directory / f"secret-{abs(hash(text))}"
        path.touch(0o600)
        path.write_text(text + "\n")
        return path


@pytest.fixture(scope="module")
def admin(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Admin]:
    directory = tmp_path_factory.mktemp("access")
    password = directory / "admin-password"
    password.touch(0o600)
    password.write_text(ADMIN_PASSWORD)
    arguments = (*ENFORCED, "--set", f"access.admin_password_file={password}", "--set", "logging.level=debug")
    with BrokerProcess(directory, *arguments) as broker:
        yield Admin(directory, broker)


def test_a_user_from_beginning_to_end(admin: Admin) -> None:
    made = admin.run("user", "create", "ann", "--role", "producer", "--new-password-file", "-", stdin=ANN_PASSWORD + "\n")
    assert made.returncode == 0, made.stderr
    assert [(row["name"], row["roles"]) for row in admin.rows("user", "list")] == [("admin", ["admin"]), ("ann", ["producer"])]
    assert admin.rows("user", "describe", "ann", user="ann", password=ANN_PASSWORD)[0]["permissions"] == ["write"]
    assert admin.run("user", "alter", "ann", "--role", "consumer", "--disable").returncode == 0
    assert admin.run("user", "describe", "ann", user="ann", password=ANN_PASSWORD).returncode == 4
    assert admin.run("user", "alter", "ann", "--enable").returncode == 0
    changed = admin.run("user", "password", "ann", "--new-password-file", "-", stdin=SECOND_PASSWORD + "\n")
    assert changed.returncode == 0, changed.stderr
    assert admin.run("user", "describe", "ann", user="ann", password=SECOND_PASSWORD).returncode == 0
    assert admin.run("user", "delete", "ann", "--yes").returncode == 0
    assert admin.run("user", "describe", "ann").returncode == 3


def test_nothing_is_visible_to_a_user_who_is_not_logged_in(admin: Admin) -> None:
    for what, command in (("topic", "topic"), ("dead letter", "dlq")):
        done = admin.run(command, "list", user="")
        assert (done.returncode, done.stdout) == (4, "")
        assert done.stderr == f"headrace: no {what} is visible to anonymous: log in with --user or --api-key\n"


def test_without_a_terminal_a_new_password_is_asked_for_by_its_own_option(admin: Admin) -> None:
    for command in ("create", "password"):
        done = admin.run("user", command, "short")
        assert done.returncode == 2
        assert "give --new-password-file" in done.stderr


def test_a_table_in_a_pipe_has_one_line_per_row(admin: Admin) -> None:
    name = "a-user-with-a-name-that-is-longer-than-a-line-of-eighty-columns-" + "x" * 40
    admin.run("user", "create", name, "--no-password", "-q")
    lines = admin.run("audit", "list", "--type", "user", "--resource", f"user:{name}").stdout.splitlines()
    assert len(lines) == 2 and f"user:{name}" in lines[1]


def test_an_error_shows_no_number_of_the_protocol(admin: Admin) -> None:
    done = admin.run("user", "create", "short", "--new-password-file", "-", stdin="x\n")
    assert done.returncode == 1
    assert done.stderr.startswith("headrace: a password needs")


@pytest.mark.parametrize(
    ("arguments", "login", "code", "words"),
    [
        (("user", "describe", "nobody"), {}, 3, 'user "nobody" not found'),
        (("user", "create", "admin", "--no-password"), {}, 7, 'user "admin" already exists'),
        (("user", "list"), {"password": secret("wrong-password")}, 4, "invalid username or password"),
        (("user", "list"), {"user": ""}, 4, "anonymous may not admin"),
        (("user", "delete", "admin"), {}, 2, "--yes"),
        (("user", "delete", "admin", "--yes"), {}, 1, "cannot delete your own account"),
        (("user", "alter", "admin"), {}, 2, "nothing to alter"),
        (("acl", "create", "fly", "topic:x", "--for-everybody"), {}, 2, "'fly' is invalid; expected one of"),
        (("acl", "create", "read", "x", "--for-everybody"), {}, 2, "is not KIND:NAME"),
        (("acl", "create", "read", "topic:x"), {}, 2, "give one of --for-user"),
        (("acl", "delete", "read", "topic:x", "--for-everybody", "--yes"), {}, 3, "not found"),
        (("key", "describe", "none"), {}, 3, 'key "none" not found'),
        (("key", "create", "nobody"), {}, 3, 'user "nobody" not found'),
        (("audit", "list"), {"user": ""}, 4, "anonymous may not admin"),
    ],
)
def test_a_failure_is_one_line_and_its_kind_is_the_exit_code(
    admin: Admin, arguments: tuple[str, ...], login: dict[str, str], code: int, words: str
) -> None:
    done = admin.run(*arguments, **login)
    assert (done.returncode, done.stdout) == (code, ""), done.stderr
    assert words in done.stderr and done.stderr.startswith("headrace: ") and done.stderr.count("\n") == 1


def test_rules_are_made_checked_and_taken_away(admin: Admin) -> None:
    def check(resource: str) -> int:
        return admin.run("acl", "check", "bob", "read", resource).returncode

    assert check("topic:orders.eu") == 4
    admin.run("acl", "create", "read,describe", "topic:orders.*", "--for-user", "bob")
    admin.run("acl", "create", "read", "topic:orders.secret", "--for-everybody", "--deny")
    assert [check(f"topic:{name}") for name in ("orders.eu", "orders.secret", "orders")] == [0, 4, 4]
    assert admin.rows("acl", "list", "--for-user", "bob") == [
        {"effect": "allow", "subject": "user:bob", "actions": ["describe", "read"], "resource": "topic:orders.*"}
    ]
    admin.run("acl", "create", "read", "topic:star\\*", "--for-user", "bob")
    assert [check("topic:star\\*"), check("topic:stars")] == [0, 4]
    admin.run("acl", "delete", "read,describe", "topic:orders.*", "--for-user", "bob", "--yes")
    assert check("topic:orders.eu") == 4
    assert admin.run("acl", "role", "clerk", "--grant", "read@topic:orders*", "--description", "reads").returncode == 0
    assert "clerk" in {row["name"] for row in admin.rows("acl", "roles")}
    assert admin.run("acl", "delete-role", "clerk", "--yes").returncode == 0


def test_a_key_is_shown_once_and_then_never(admin: Admin) -> None:
    admin.run("user", "create", "lorry", "--no-password", "--role", "producer")
    (made,) = admin.rows("key", "create", "lorry", "--scope", "publish@topic:gps*", "--expires-in", "1h", "--description", "no. 7")
    key, id = str(made["key"]), str(made["id"])
    (listed,) = admin.rows("key", "list", "--owner", "lorry")
    assert (listed["id"], listed["scopes"], listed["in_force"]) == (id, ["publish@topic:gps*"], True)
    everything = "".join(
        admin.run(*words).stdout for words in (("key", "list"), ("key", "describe", id), ("audit", "list"), ("audit", "export"))
    )
    assert id in everything and key not in everything and key.split("_", 2)[2] not in everything
    assert admin.run("key", "alter", id, "--expires-in", "0").returncode == 0
    (altered,) = admin.rows("key", "alter", id, "--scope", "publish@topic:gps", "--scope", "read@topic:orders*")
    assert altered["scopes"] == ["publish@topic:gps", "read@topic:orders*"]
    assert admin.rows("key", "alter", id, "--no-scopes")[0]["scopes"] == []
    assert admin.run("key", "alter", id, "--no-scopes", "--scope", "read@topic:x").returncode == 2
    assert admin.rows("topic", "list", user=id, password=key) == [], "a key logs in too"
    given = admin.run("topic", "list", "--api-key", f"file:{admin.secret(key)}", user="")
    assert (given.returncode, given.stderr) == (0, "no topic is visible to lorry\n")
    assert admin.run("key", "revoke", id, "--yes").returncode == 0
    assert admin.rows("key", "describe", id)[0]["in_force"] is False
    assert admin.run("key", "delete", id, "--yes").returncode == 0
    assert admin.run("key", "describe", id).returncode == 3


def test_the_audit_log_tells_who_did_what(admin: Admin) -> None:
    admin.run("user", "create", "temporary", "--no-password")
    admin.run("user", "list", password=secret("wrong-password"))
    (row,) = admin.rows("audit", "list", "--type", "user", "--resource", "user:temporary")
    assert (row["user"], row["action"], row["protocol"], row["address"], row["result"]) == (
        "admin",
        "create",
        "flymq",
        "127.0.0.1",
        "success",
    )
    assert admin.rows("audit", "list", "--type", "login", "--result", "failure", "--by", "admin")
    lines = list(csv.DictReader(admin.run("audit", "export", "--format", "csv", "-n", "3").stdout.splitlines()))
    assert len(lines) == 3 and lines[0]["user"] == "admin"


def test_records_need_a_login_too(admin: Admin) -> None:
    assert admin.run("topic", "create", "gps").returncode == 0
    assert admin.run("pub", "gps", "hello", "--protocol", "flymq", user="").returncode == 4
    assert admin.run("pub", "gps", "hello", "--protocol", "flymq").returncode == 0
    assert admin.run("fetch", "gps", "--from", "earliest", "--protocol", "flymq").stdout == "hello\n"
    assert admin.run("pub", "gps", "hello", "--protocol", "rustlog", user="").returncode != 0
    for command in (["pub", "gps", "hello"], ["sub", "gps"], ["fetch", "gps"], ["sub", "gps", "--group", "g"]):
        done = admin.run(*command, user="")
        assert done.returncode == 4 and "anonymous may not" in done.stderr, command


def command_lines() -> Iterator[bytes]:
    """Return the command lines of all processes, which every user can read."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            yield path.read_bytes()
        except OSError:
            continue  # the process has ended


def test_no_secret_is_in_a_log_an_answer_the_configuration_the_process_list_or_on_disk(admin: Admin) -> None:
    """Runs last, after the tests that pass secrets."""
    assert not any(map(shows, command_lines()))
    stored = b"".join(path.read_bytes() for path in admin.broker.data.rglob("*") if path.is_file())
    assert not shows(stored)
    code, out, errors = admin.broker.stop()
    assert code == 0
    assert not shows(out + errors)
    assert "hr_" not in errors
