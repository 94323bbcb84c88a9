"""The ready file appears atomically."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.server.ready import ReadyFile


def test_it_tells_the_process_and_its_protocols(tmp_path: Path) -> None:
    ReadyFile(tmp_path / "ready").write({"tcp": ("127.0.0.1:1", "[::1]:2")})
    assert json.loads((tmp_path / "ready").read_text()) == {"pid": os.getpid(), "protocols": {"tcp": ["127.0.0.1:1", "[::1]:2"]}}
    assert [path.name for path in tmp_path.iterdir()] == ["ready"], "nothing is left beside it"


def test_a_stale_one_is_cleared_before_the_start(tmp_path: Path) -> None:
    (tmp_path / "ready").write_text("{}")
    ready = ReadyFile(tmp_path / "ready")
    ready.clear()
    assert not (tmp_path / "ready").exists()
    ready.clear()


def test_it_goes_at_exit_and_only_if_it_is_ours(tmp_path: Path) -> None:
    path = tmp_path / "ready"
    ready = ReadyFile(path)
    path.write_text("of somebody else")
    ready.remove()
    assert path.exists()
    ready.write({})
    ready.remove()
    assert not path.exists()
    ready.remove()


def test_a_place_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--ready-file .*absent/ready: No such file or directory"):
        ReadyFile(tmp_path / "absent" / "ready").write({})
