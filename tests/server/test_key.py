"""The encryption key is read from the configured place; errors never contain it."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.api_keys import read_key
from headrace.server.config import Storage
from tests.canaries import ENCRYPTION_KEY

KEY = ENCRYPTION_KEY


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "key"
    path.touch(mode=0o600)
    return path


def start_error(storage: Storage, **environment: str) -> str:
    with pytest.raises(ConfigError) as caught:
        read_key(storage, environment)
    return str(caught.value)


def test_without_a_reference_there_is_no_key() -> None:
    assert read_key(Storage(), {"KEY": KEY.hex()}) is None


@pytest.mark.parametrize("content", [KEY, KEY.hex().encode(), KEY.hex().upper().encode() + b"\n"])
def test_a_key_file_holds_bytes_or_digits(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert read_key(Storage(key_file=str(file)), {}) == KEY


def test_a_variable_holds_digits() -> None:
    assert read_key(Storage(key_env="KEY"), {"KEY": KEY.hex()}) == KEY


@pytest.mark.parametrize("content", [b"", KEY[:-1], KEY + b"x", b"z" * 64, KEY.hex()[:-1].encode(), b"\xff" * 64])
def test_anything_else_is_rejected_without_being_shown(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    text = start_error(Storage(key_file=str(file)))
    assert "does not hold a key; expected 64 hexadecimal digits" in text
    assert "zzzz" not in text
    assert KEY.hex()[:-1] not in text


def test_an_absent_file_and_an_absent_variable_are_named(tmp_path: Path) -> None:
    assert start_error(Storage(key_file=str(tmp_path / "absent"))).endswith("absent: No such file or directory")
    assert start_error(Storage(key_env="KEY")) == "storage.key_env: the environment variable KEY is not set"


def test_a_key_that_other_users_can_read_is_rejected(file: Path) -> None:
    file.write_bytes(KEY)
    file.chmod(0o604)
    assert "can be read by others (mode 604)" in start_error(Storage(key_file=str(file)))
    file.chmod(0o640)
    assert read_key(Storage(key_file=str(file)), {}) == KEY
