"""The ready file: how a supervisor, a test or a script learns that every protocol is open, and where.

    {"pid": 4711, "protocols": {"tcp": ["127.0.0.1:41123"]}}

It appears whole or not at all (written beside, then renamed) and goes when the broker goes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path

from headrace.errors import ConfigError


class ReadyFile:
    """One file; all calls are harmless when there is nothing to do."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written = False

    def clear(self) -> None:
        """Remove what an earlier life left: a stale file would say that we are ready before we are."""
        try:
            self._path.unlink(missing_ok=True)
        except OSError as failure:
            raise self._failed(failure) from None

    def write(self, protocols: Mapping[str, Sequence[str]]) -> None:
        beside = self._path.with_name(f".{self._path.name}.{os.getpid()}")
        content = json.dumps({"pid": os.getpid(), "protocols": {kind: list(addresses) for kind, addresses in protocols.items()}})
        try:
            beside.write_text(content + "\n", encoding="utf-8")
            beside.replace(self._path)
        except OSError as failure:
            raise self._failed(failure) from None
        self._written = True

    def remove(self) -> None:
        """At exit. A file we did not write is not ours to remove; one that cannot be removed must not stop the exit."""
        if self._written:
            try:
                self._path.unlink(missing_ok=True)
            except OSError:
                pass
            self._written = False

    def _failed(self, failure: OSError) -> ConfigError:
        return ConfigError(f"--ready-file {self._path}: {failure.strerror or failure}")
