"""`headrace context`: named brokers, and who can read their secrets."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.canaries import secret
from tests.cli.shell import Ended, Shell, headrace, shell_of_a_broker

PASSWORD = secret("context-password")


@pytest.fixture(scope="module")
def shell() -> Iterator[Shell]:
    with shell_of_a_broker() as shell:
        yield shell


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    return tmp_path / "headrace" / "contexts.json"


def names(done: Ended) -> list[tuple[str, str]]:
    assert done.code == 0, done.err
    return [(row["current"], row["name"]) for row in json.loads(done.out)]


def test_contexts_are_added_chosen_listed_and_removed(home: Path) -> None:
    assert headrace("context", "list").code == 0
    assert headrace("context", "add", "a", "--server", "127.0.0.1:1", "--flight", "127.0.0.1:2").code == 0
    assert headrace("context", "add", "b", "--server", "flymq+tls://broker:9092", "--tls-ca", "ca.pem").code == 0
    assert names(headrace("context", "list", "-o", "json")) == [("*", "a"), ("", "b")]
    assert headrace("context", "use", "b").code == 0
    rows = json.loads(headrace("context", "list", "-o", "json").out)
    assert [(row["current"], row["tls"], row["tls_ca"]) for row in rows] == [("", False, ""), ("*", True, str(Path("ca.pem").absolute()))]
    assert headrace("context", "remove", "b").code == 0
    assert names(headrace("context", "list", "-o", "json")) == [("", "a")]
    missing = headrace("context", "use", "none")
    assert (missing.code, missing.err) == (1, "headrace: context 'none' not found; known are a\n")


def test_a_name_is_not_replaced_by_accident_and_a_wrong_address_is_found_at_once(home: Path) -> None:
    assert headrace("context", "add", "a", "--server", "127.0.0.1:1").code == 0
    assert headrace("context", "add", "a", "--server", "127.0.0.1:2").code == 7
    assert headrace("context", "add", "a", "--server", "127.0.0.1:2", "--force").code == 0
    assert headrace("context", "add", "x", "--server", "nowhere").code == 2


def test_secrets_are_in_a_file_that_only_its_owner_can_read_and_in_no_output(home: Path) -> None:
    add = ["context", "add", "a", "--server", "127.0.0.1:1", "--user", "ann", "--password-file", "-"]
    assert headrace(*add, given=f"{PASSWORD}\n".encode()).code == 0
    assert stat.S_IMODE(home.stat().st_mode) == 0o600 and stat.S_IMODE(home.parent.stat().st_mode) == 0o700
    assert json.loads(home.read_text())["contexts"]["a"]["password"] == PASSWORD
    listed = headrace("context", "list", "-o", "json")
    assert PASSWORD.encode() not in listed.out and json.loads(listed.out)[0]["secret"] == "password"
    home.chmod(0o644)
    open_to_others = headrace("topic", "list")
    assert open_to_others.code == 1 and "chmod 600" in open_to_others.err
    home.unlink()  # the canaries look for secrets in files


def test_commands_use_the_current_context_or_the_named_one(home: Path, shell: Shell) -> None:
    headrace("context", "add", "dead", "--server", "127.0.0.1:1")
    headrace("context", "add", "live", "--server", shell.address)
    assert headrace("topic", "list").code == 5
    assert headrace("topic", "list", "--context", "live").code == 0
    assert headrace("topic", "list", HEADRACE_CONTEXT="live").code == 0
    headrace("context", "use", "live")
    assert headrace("pub", "contexts", "x", "-q").code == 0
    assert headrace("fetch", "contexts").out == b"x\n"


def test_a_context_and_an_option_take_several_addresses_and_use_the_first_that_answers(home: Path, shell: Shell) -> None:
    both = f"127.0.0.1:1,{shell.address}"
    assert headrace("topic", "list", "--server", both).code == 0
    assert headrace("topic", "list", "--server", f"flymq://{both}").code == 0
    assert headrace("context", "add", "both", "--server", both).code == 0
    assert headrace("topic", "list").code == 0
    none = headrace("topic", "list", "--server", "127.0.0.1:1,127.0.0.1:2")
    assert none.code == 5 and "127.0.0.1:2: " in none.err
    assert headrace("topic", "list", "--server", "127.0.0.1:1,").code == 2


def test_an_address_excludes_the_context_because_its_secrets_are_for_its_own_broker(home: Path, shell: Shell) -> None:
    add = ["context", "add", "other", "--server", "127.0.0.1:1", "--user", "ann", "--password-file", "-"]
    headrace(*add, given=f"{PASSWORD}\n".encode())
    assert headrace("ping", "--server", shell.address).code == 0
    assert headrace("ping", HEADRACE_SERVER=shell.address).code == 0
    both = headrace("ping", "--server", shell.address, "--context", "other")
    assert both.code == 2 and "give either --server or --context" in both.err
    home.unlink()


def test_a_password_of_a_context_is_only_for_its_user(home: Path, shell: Shell) -> None:
    add = ["context", "add", "c", "--server", shell.address, "--user", "ann", "--password-file", "-"]
    headrace(*add, given=f"{PASSWORD}\n".encode())
    other = headrace("ping", "--user", "bob")
    assert other.code == 2 and "no terminal to prompt for the password" in other.err
    home.unlink()


def test_a_file_that_holds_something_else_is_an_error(home: Path) -> None:
    home.parent.mkdir()
    home.write_text('{"contexts": {"a": {"sever": "x"}}}')
    home.chmod(0o600)
    done = headrace("topic", "list")
    assert done.code == 1 and "is not a file of contexts" in done.err
