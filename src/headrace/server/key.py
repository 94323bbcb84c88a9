"""Encryption key of the data directory, read from the configured file or variable. It is never logged, printed or stored."""

from __future__ import annotations

import os
import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.server.config import Storage

KEY_BYTES: Final = 32
_FILE_BYTES_MAX: Final = 4096


def read_key(storage: Storage, environment: Mapping[str, str]) -> bytes | None:
    """Return the key, or None if none is configured. Raises `ConfigError`, whose text never contains the key."""
    if storage.key_file:
        return _from_file(Path(storage.key_file))
    if storage.key_env:
        if storage.key_env not in environment:
            raise ConfigError(f"storage.key_env: the environment variable {storage.key_env} is not set")
        return _from_text(environment[storage.key_env], f"storage.key_env: {storage.key_env}")
    return None


def _from_file(path: Path) -> bytes:
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            content = stream.read(_FILE_BYTES_MAX)
    except OSError as failure:
        raise ConfigError(f"storage.key_file: {path}: {failure.strerror or failure}") from None
    if stat.S_ISREG(mode) and mode & 0o007:
        raise ConfigError(f"storage.key_file: {path} can be read by others (mode {mode & 0o777:o}); chmod 600 it")
    if len(content) == KEY_BYTES:
        return content
    return _from_text(content.decode("ascii", "replace"), f"storage.key_file: {path}")


def _from_text(text: str, where: str) -> bytes:
    digits = text.strip()
    if len(digits) == 2 * KEY_BYTES:
        try:
            return bytes.fromhex(digits)
        except ValueError:
            pass
    raise ConfigError(f"{where} does not hold a key; expected {2 * KEY_BYTES} hexadecimal digits (openssl rand -hex {KEY_BYTES})")
