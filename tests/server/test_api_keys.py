"""BlipMQ API keys: their sources, and that they are never logged."""

from __future__ import annotations

import socket
import stat
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.api_keys import configured, load_or_generate
from headrace.server.settings import References
from headrace.wire.blipmq import Decoder, Nack, Pong, encoder
from tests.canaries import secret
from tests.server.process import BrokerProcess, start_error

SECRET = secret("api-key")


def private(path: Path, content: str, mode: int = 0o600) -> Path:
    path.touch(mode)
    path.chmod(mode)
    path.write_text(content)
    return path


def test_keys_come_from_files_variables_and_the_flag(tmp_path: Path) -> None:
    alice = private(tmp_path / "a", " one \n")
    references = References().parse([f"alice=file:{alice}", "env:KEY"])
    flags = ["three", f"bob=file:{private(tmp_path / 'b', 'four')}"]
    assert configured(references, flags, {"KEY": "two"}) == {"one": "alice", "two": "blipmq", "three": "blipmq", "four": "bob"}


@pytest.mark.parametrize(
    ("reference", "words"),
    [
        ("env:ABSENT", "the environment variable ABSENT is not set"),
        ("env:EMPTY", "does not hold a key"),
        ("file:absent", "No such file or directory"),
        ("file:open", r"can be read by others \(mode 604\); chmod 600 it"),
        ("file:empty", "is empty"),
        ("file:latin", "is not UTF-8"),
        ("file:long", "does not hold a key; expected 1 to 65535 bytes"),
    ],
)
def test_a_reference_that_leads_to_no_key_is_rejected_without_the_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reference: str, words: str
) -> None:
    monkeypatch.chdir(tmp_path)
    private(tmp_path / "open", SECRET, 0o604)
    private(tmp_path / "empty", "\n")
    private(tmp_path / "latin", "").write_bytes(b"caf\xe9")
    private(tmp_path / "long", SECRET * 5_000)
    with pytest.raises(ConfigError, match=words) as caught:
        configured(References().parse([reference]), [], {"EMPTY": " "})
    assert SECRET not in str(caught.value)


def test_a_key_is_made_once_and_kept_for_its_owner_alone(tmp_path: Path) -> None:
    first, second = load_or_generate(tmp_path), load_or_generate(tmp_path)
    assert (first.owners, first.generated, second.generated) == (second.owners, tmp_path / "blipmq.key", None)
    (key,) = first.owners
    assert len(key) >= 43, "32 random bytes"
    assert stat.S_IMODE((tmp_path / "blipmq.key").stat().st_mode) == 0o600
    assert key not in repr(first)
    assert kept_elsewhere(tmp_path / "other") != key


def kept_elsewhere(directory: Path) -> str:
    directory.mkdir()
    (key,) = load_or_generate(directory).owners
    return key


def test_what_an_interrupted_start_left_behind_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / ".blipmq.key").write_text("")
    assert load_or_generate(tmp_path).generated == tmp_path / "blipmq.key"
    assert not (tmp_path / ".blipmq.key").exists()


def login(address: tuple[str, int], key: str) -> int:
    """Return 0 if the key is accepted and the PING answered, otherwise the code of the first error."""
    with socket.create_connection(address, timeout=300) as peer:
        peer.sendall(encoder.hello(1) + encoder.auth(2, key.encode()) + encoder.ping(3))
        decoder = Decoder()
        while data := peer.recv(4096):
            for answer in decoder.feed(data):
                if isinstance(answer, (Pong, Nack)):
                    return answer.code if isinstance(answer, Nack) else 0
    raise AssertionError("closed without an answer")


def test_the_made_key_is_shown_once_and_opens_the_protocol_ever_after(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        key = (tmp_path / "data" / "blipmq.key").read_text().strip()
        assert login(broker.addresses[0], key) == 0
        assert login(broker.addresses[0], key[:-1]) == 401
        _, out, errors = broker.stop()
    assert out.count(key) == 1
    assert key not in errors
    with BrokerProcess(tmp_path) as again:
        assert login(again.addresses[0], key) == 0
        _, out, errors = again.stop()
    assert key not in out + errors


def test_a_configured_key_replaces_the_made_one_and_is_never_shown(tmp_path: Path) -> None:
    file = private(tmp_path / "key", SECRET)
    with BrokerProcess(tmp_path, "--blipmq-key", f"file:{file}", "--set", "logging.level=debug") as broker:
        assert login(broker.addresses[0], SECRET) == 0
        assert login(broker.addresses[0], "wrong") == 401
        _, out, errors = broker.stop()
    assert not (tmp_path / "data" / "blipmq.key").exists()
    assert SECRET not in out + errors
    assert "wrong" not in errors


def test_a_key_on_the_command_line_works_with_a_warning(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--blipmq-key", "open-to-all-eyes") as broker:
        assert login(broker.addresses[0], "open-to-all-eyes") == 0
        _, out, errors = broker.stop()
    assert "other users of this machine can read it" in errors
    assert "open-to-all-eyes" not in out + errors


def test_no_key_is_made_that_could_not_be_used(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path, "--listen", "127.0.0.1:0=figg,rustlog,flymq") as broker:
        broker.stop()
    assert not (tmp_path / "data" / "blipmq.key").exists()


def test_an_absent_variable_is_one_clear_line(tmp_path: Path) -> None:
    text = start_error(tmp_path, HEADRACE__BLIPMQ__KEYS="env:ABSENT")
    assert text == "blipmq.keys: the environment variable ABSENT is not set"
