"""Contexts: named brokers with address, user, TLS and Flight endpoint, in one file that only its owner can read.

$XDG_CONFIG_HOME/headrace/contexts.json     {"current": "prod", "contexts": {"prod": {"server": …, "user": …, …}}}
"""

from __future__ import annotations

import dataclasses
import json
import os
import stat
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from headrace.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Context:
    """One broker. Empty fields are not set."""

    server: str = ""
    """HOST:PORT or URL, as `--server`."""
    flight: str = ""
    """HOST:PORT of the Flight endpoint."""
    user: str = ""
    password: str = field(default="", repr=False)
    api_key: str = field(default="", repr=False)
    """An API key, or file:PATH or env:NAME."""
    tls: bool = False
    tls_ca: str = ""
    tls_certificate: str = ""
    tls_key: str = ""


@dataclass(frozen=True, slots=True)
class Contexts:
    """Content of the file."""

    by_name: Mapping[str, Context]
    current: str = ""

    def named(self, name: str) -> Context:
        """Return a context. Raises `ConfigError`."""
        if name not in self.by_name:
            known = f"known are {', '.join(sorted(self.by_name))}" if self.by_name else "there is none; headrace context add creates one"
            raise ConfigError(f"context {name!r} not found; {known}")
        return self.by_name[name]


def contexts_file() -> Path:
    home = os.environ.get("XDG_CONFIG_HOME") or ""
    return (Path(home) if Path(home).is_absolute() else Path.home() / ".config") / "headrace" / "contexts.json"


def load() -> Contexts:
    """Read the file; without one there are no contexts. Raises `ConfigError`, also if others can read it: it holds secrets."""
    path = contexts_file()
    try:
        with path.open("rb") as stream:
            mode = os.fstat(stream.fileno()).st_mode
            content = json.load(stream)
        if mode & 0o077:
            raise ConfigError(f"{path} can be read by others (mode {stat.S_IMODE(mode):o}); chmod 600 it")
        return _parse(content)
    except (FileNotFoundError, NotADirectoryError):
        return Contexts({})
    except OSError as failure:
        raise ConfigError(f"{path}: {failure.strerror or failure}") from None
    except (ValueError, TypeError, AttributeError, KeyError) as failure:
        raise ConfigError(f"{path} is not a file of contexts: {failure}") from None


def _parse(content: Any) -> Contexts:
    found = {str(name): Context(**fields) for name, fields in content["contexts"].items()}
    return Contexts(found, str(content.get("current", "")))


def save(contexts: Contexts) -> None:
    """Replace the file, with mode 0600. Raises `ConfigError`."""
    path = contexts_file()
    plain = {
        "current": contexts.current,
        "contexts": {
            name: {key: value for key, value in dataclasses.asdict(one).items() if value} for name, one in sorted(contexts.by_name.items())
        },
    }
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with os.fdopen(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as stream:
            json.dump(plain, stream, indent=2, ensure_ascii=False)
            stream.write("\n")
            stream.flush()
            os.fsync(stream.fileno())
        beside.replace(path)
    except OSError as failure:
        beside.unlink(missing_ok=True)
        raise ConfigError(f"{path}: {failure.strerror or failure}") from None


def chosen(name: str | None) -> Context | None:
    """Return the context of that name, else the current one; None if there is neither. Raises `ConfigError`."""
    contexts = load()
    if name:
        return contexts.named(name)
    return contexts.by_name.get(contexts.current)
