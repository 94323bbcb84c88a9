"""BlipMQ's API keys: found where the configuration says, or made at the first start and kept in the data directory.

A key is never logged. The one that is made is shown once, on stdout, by the start that made it.
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
from headrace.server.settings import References, SecretReference

_log = logging.getLogger(__name__)
FILE_NAME: Final = "blipmq.key"
KEY_BYTES_MAX: Final = 65_535
"""What an AUTH frame can carry."""
OWNER: Final = "blipmq"
"""Who the user of a key without a named owner is."""
_RANDOM_BYTES: Final = 32


@dataclass(frozen=True, slots=True)
class ApiKeys:
    """The keys with their owners; `made` is the file of a key that did not exist before."""

    owners: Mapping[str, str]
    made: Path | None = None

    def __repr__(self) -> str:
        return f"ApiKeys({len(self.owners)} keys)"


def from_flag(text: str) -> tuple[str, str] | SecretReference:
    """What --blipmq-key holds: a reference, or (key, owner)."""
    try:
        return References.one(text)
    except ValueError:
        return text, OWNER


def configured(references: Iterable[SecretReference], flags: Iterable[str], environment: Mapping[str, str]) -> dict[str, str]:
    """All keys that are configured, with their owners. Raises `ConfigError`, without a key in it."""
    owners: dict[str, str] = {}
    found = [*references, *map(from_flag, flags)]
    for entry in found:
        if isinstance(entry, SecretReference):
            key, owner, where = _read(entry, environment), entry.owner or OWNER, f"blipmq.keys: {entry}"
        else:
            (key, owner), where = entry, "--blipmq-key"
            _log.warning("--blipmq-key: other users of this machine can see a command line; file:PATH or env:NAME hides the key")
        if not 0 < len(key.encode()) <= KEY_BYTES_MAX:
            raise ConfigError(f"{where} does not hold a key; expected 1 to {KEY_BYTES_MAX} bytes")
        owners[key] = owner
    return owners


def kept(directory: Path) -> ApiKeys:
    """The key of the data directory, made now if there is none. The caller holds the directory. Raises `ConfigError`."""
    path = directory / FILE_NAME
    try:
        if path.exists():
            return ApiKeys({_private_text(path): OWNER})
        _write(path, secrets.token_urlsafe(_RANDOM_BYTES))
        return ApiKeys({_private_text(path): OWNER}, made=path)
    except OSError as failure:
        raise ConfigError(f"{path}: {failure.strerror or failure}") from None


def _write(path: Path, key: str) -> None:
    """Whole or not at all, and never readable by others, not even for a moment."""
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
    """The secret in a file that others cannot read; `key` is what the configuration calls it. Raises `ConfigError`, and `OSError`."""
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
