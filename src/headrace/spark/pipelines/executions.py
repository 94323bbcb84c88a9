"""Executions of pipelines on this machine: list, status, stop.

    CHECKPOINT/.headrace/status.json     replaced atomically, about once a second
    CHECKPOINT/.headrace/lock            locked during an execution: two executions on one checkpoint would corrupt it
    CHECKPOINT/.headrace/stop            created by `headrace pipeline stop`
    CHECKPOINT/.headrace/spark.log       output of Spark

`$XDG_STATE_HOME/headrace/pipelines` holds one small file per pipeline, for `list`. It also holds the execution directory of a checkpoint
that is not on this machine (hdfs://…).
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from headrace.errors import BrokerError

_LIVE: Final = ("starting", "running", "stopping")


class AlreadyRunning(BrokerError):
    """A pipeline is running on that checkpoint."""

    code = "entry_exists"


class UnknownExecution(BrokerError):
    """No pipeline of that name has run on this machine."""

    code = "no_such_entry"


def entries_directory(environment: Mapping[str, str] = os.environ) -> Path:
    """Return the directory of the entries for `list`."""
    if "HEADRACE_PIPELINES" in environment:
        return Path(environment["HEADRACE_PIPELINES"])
    home = environment.get("XDG_STATE_HOME") or os.path.join(os.path.expanduser("~"), ".local", "state")
    return Path(home) / "headrace" / "pipelines"


def execution_directory(checkpoint: str) -> Path:
    """Return the directory of the status for this checkpoint."""
    if "://" in checkpoint:
        return entries_directory() / _digest(checkpoint)
    return Path(checkpoint) / ".headrace"


def process_birth(pid: int) -> int | None:
    """Return the start time of a process, in ticks since boot; None if it does not exist. Pid and start time identify a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The program name is in parentheses and may contain any character; numbers follow the last parenthesis.
    fields = stat.rpartition(")")[2].split()
    return None if fields[0] in ("Z", "X") else int(fields[19])


class Execution:
    """Execution of a pipeline in this process: holds the lock, writes the status, checks for a stop request."""

    def __init__(self, name: str, checkpoint: str, *, file: str, now_ms: int, graph: Mapping[str, object] | None = None) -> None:
        """`graph` is that of `Pipeline.graph`, for those who show the execution."""
        self.name, self.checkpoint, self.file, self._graph = name, checkpoint, file, graph or {}
        self.directory = execution_directory(checkpoint)
        self._started = now_ms
        self._lock: int | None = None

    def __enter__(self) -> Execution:
        self.directory.mkdir(parents=True, exist_ok=True)
        lock = os.open(self.directory / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            os.close(lock)
            pid = (_read(self.directory / "status.json") or {}).get("pid")
            raise AlreadyRunning(f"pipeline {self.name} runs already (pid {pid}) with the checkpoint {self.checkpoint}") from None
        self._lock = lock
        (self.directory / "stop").unlink(missing_ok=True)
        entries = entries_directory()
        entries.mkdir(parents=True, exist_ok=True)
        entry = {"name": self.name, "checkpoint": self.checkpoint, "directory": str(self.directory.absolute()), "file": self.file}
        _replace(entries / f"{self.name}-{_digest(self.checkpoint)}.json", entry)
        return self

    def __exit__(self, kind: type[BaseException] | None, failure: BaseException | None, trace: TracebackType | None) -> None:
        if self._lock is not None:
            os.close(self._lock)

    @property
    def is_stop_wanted(self) -> bool:
        return (self.directory / "stop").exists()

    def write(self, state: str, queries: list[dict[str, object]], *, now_ms: int, master: str = "", error: str = "") -> None:
        """Replace the status atomically."""
        status = {
            "name": self.name,
            "state": state,
            "file": self.file,
            "checkpoint": self.checkpoint,
            "pid": os.getpid(),
            "born": process_birth(os.getpid()),
            "host": socket.gethostname(),
            "master": master,
            "started": self._started,
            "updated": now_ms,
            "error": error,
            "queries": queries,
            "graph": self._graph,
        }
        _replace(self.directory / "status.json", status)


def executions() -> list[dict[str, Any]]:
    """Return the status of every pipeline that has run here and whose checkpoint still exists, by name."""
    found = []
    for entry in sorted(entries_directory().glob("*.json")):
        known = _read(entry)
        status = None if known is None else status_in(Path(known["directory"]))
        if status is not None:
            found.append(status)
    return found


def find(what: str) -> dict[str, Any]:
    """Find an execution by name, file or checkpoint. Raises `UnknownExecution`."""
    path = Path(what)
    if path.is_dir() and (found := status_in(path / ".headrace")) is not None:
        return found
    known = executions()
    is_file = path.suffix in (".toml", ".py") or path.exists()
    matching = [status for status in known if status["name"] == what or (is_file and status["file"] == str(path.absolute()))]
    matching = [status for status in matching if status["state"] in _LIVE] or matching
    if not matching:
        names = ", ".join(sorted({status["name"] for status in known}))
        raise UnknownExecution(f"no pipeline {what} has run here{f'; there is {names}' if names else ''}")
    if len({status["checkpoint"] for status in matching}) > 1:
        places = ", ".join(status["checkpoint"] for status in matching)
        raise AlreadyRunning(f"several pipelines are called {what}: select one by its checkpoint ({places})")
    return matching[0]


def status_in(directory: Path) -> dict[str, Any] | None:
    """Read the status. An execution whose process no longer exists is `lost`."""
    status = _read(directory / "status.json")
    if status is not None and status["state"] in _LIVE and not is_alive(status):
        status["state"] = "lost"
    return status


def is_alive(status: Mapping[str, Any]) -> bool:
    """Return whether the process that wrote the status still runs. A process on another host is assumed to run."""
    if status["host"] != socket.gethostname():
        return True
    return bool(process_birth(status["pid"]) == status["born"])


def ask_to_stop(status: Mapping[str, Any]) -> None:
    """Request a stop: the execution checks for this file several times a second."""
    (execution_directory(status["checkpoint"]) / "stop").touch()


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:10]


def _read(file: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def _replace(file: Path, content: dict[str, Any]) -> None:
    temporary = file.with_name(f".{file.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, ensure_ascii=False), encoding="utf-8")
    temporary.replace(file)
