"""BlipMQ API keys: read from the configured references, or generated at the first start and stored in the data directory.

Keys are never logged. A generated key is printed once on stdout.

Encryption key of the data directory, read from the configured file or variable. It is never logged, printed or stored.
"""

from __future__ import annotations

import logging
import os
import secrets
import stat
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from headrace.errors import ConfigError
from headrace.server.config import Storage
from headrace.server.settings import References, SecretReference

_log = logging.getLogger(__name__)
FILE_NAME: Final = "blipmq.key"
KEY_BYTES_MAX: Final = 65_535
"""The largest key in an AUTH frame."""
OWNER: Final = "blipmq"
"""The user of a key without a named owner."""
_RANDOM_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """API keys and their owners; `generated` is the file of a new key."""

    owners: Mapping[str, str]
    generated: Path | None = None

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.owners)} keys)"


def from_flag(text: str) -> tuple[str, str] | SecretReference:
    """Parse --blipmq-key: return a reference or (key, owner)."""
    try:
        return References.one(text)
    except ValueError:
        return text, OWNER


def configured(references: Iterable[SecretReference], flags: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """Return all configured keys and their owners. Raises `ConfigError`, whose text never contains a key."""
    owners: dict[str, str] = {}
    found = [*references, *map(from_flag, flags)]
    for entry in found:
        if isinstance(entry, SecretReference):
            key, owner, where = _read(entry, environment), entry.owner or OWNER, f"blipmq.keys: {entry}"
        else:
            (key, owner), where = entry, "--blipmq-key"
            _log.warning("key on the command line: other users of this machine can read it; use --blipmq-key file:PATH or env:NAME")
        if not 0 < len(key.encode()) <= KEY_BYTES_MAX:
            raise ConfigError(f"{where} does not hold a key; expected 1 to {KEY_BYTES_MAX} bytes")
        owners[key] = owner
    return owners


def load_or_generate(directory: Path) -> ApiKeys:
    """Return the key of the data directory, generated if absent. The caller holds the directory lock. Raises `ConfigError`."""
    path = directory / FILE_NAME
    try:
        if path.exists():
            return ApiKeys({_private_text(path): OWNER})
        _write(path, secrets.token_urlsafe(_RANDOM_BYTES))
        return ApiKeys({_private_text(path): OWNER}, generated=path)
    except OSError as failure:
        raise ConfigError(f"{path}: {failure.strerror or failure}") from None


def _write(path: Path, key: str) -> None:
    """Write the file atomically and never readable by other users."""
    beside = path.with_name(f".{path.name}")
    beside.unlink(missing_ok=True)
    descriptor = os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    with os.fdopen(descriptor, "w", encoding="ascii") as stream:
        stream.write(key + "\n")
        stream.flush()
        os.fsync(stream.fileno())
    beside.replace(path)
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(directory)
    finally:
        os.close(directory)


def _read(reference: SecretReference, environment: Mapping[str, str]) -> str:
    if reference.kind == "env":
        if reference.place not in environment:
            raise ConfigError(f"blipmq.keys: the environment variable {reference.place} is not set")
        return environment[reference.place].strip()
    path = Path(reference.place)
    try:
        return _private_text(path)
    except OSError as failure:
        raise ConfigError(f"blipmq.keys: {path}: {failure.strerror or failure}") from None


def _private_text(path: Path) -> str:
    return private_text(path, "blipmq.keys")


def private_text(path: Path, key: str) -> str:
    """Read a secret from a file that other users cannot read; `key` is the configuration key. Raises `ConfigError` and `OSError`."""
    with path.open("rb") as stream:
        mode = os.fstat(stream.fileno()).st_mode
        content = stream.read(KEY_BYTES_MAX + 2)
    if stat.S_ISREG(mode) and mode & 0o007:
        raise ConfigError(f"{key}: {path} can be read by others (mode {mode & 0o777:o}); chmod 600 it")
    try:
        text = content.decode("utf-8").strip()
    except UnicodeDecodeError:
        raise ConfigError(f"{key}: {path} is not UTF-8") from None
    if not text:
        raise ConfigError(f"{key}: {path} is empty")
    return text


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
