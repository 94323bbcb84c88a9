"""The life of a broker process: start, ready, drain, gone.

The first SIGTERM or SIGINT drains: no new connections, what was received is finished and acknowledged, then exit code 0. A second one
exits at once, as a crash would: everything acknowledged is on disk anyway. SIGHUP loads the certificates anew.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from headrace import __version__
from headrace.log.batch import CHECKSUMS_IN_C
from headrace.records import Ack
from headrace.server.api_keys import configured
from headrace.server.choices import AccessMode
from headrace.server.config import Config
from headrace.server.descriptors import raise_file_limit
from headrace.server.key import read_key
from headrace.server.logs import set_up_logs
from headrace.server.ready import ReadyFile
from headrace.server.supervisor import notify
from headrace.server.wiring import Opened, Server

_log = logging.getLogger(__name__)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_ACCESS: Final = {
    AccessMode.OPEN: "open: whoever can reach an address may do everything (access.mode)",
    AccessMode.ENFORCED: "enforced: users, rules and keys decide",
}
_COLLECT_AFTER_OBJECTS: Final = 20_000
"""A collection of so many takes about a millisecond."""
_PROMISES: Final = {
    Ack.DURABLE: "fdatasync before every acknowledgement",
    Ack.WRITTEN: "survives the death of the process, not of the machine",
    Ack.NONE: "may be lost any time",
}


@dataclass(frozen=True, slots=True)
class Life:
    """What the command line says about this one run, beside the configuration."""

    ready_file: Path | None = None
    duration_seconds: float | None = None
    """Drain by itself after so long; None: when told to."""
    blipmq_keys: tuple[str, ...] = ()
    """API keys of this run: references, or keys themselves, which then never become part of the configuration."""

    def __repr__(self) -> str:
        return f"Life(ready_file={self.ready_file}, duration_seconds={self.duration_seconds}, {len(self.blipmq_keys)} keys)"


def serve(config: Config, life: Life, environment: Mapping[str, str]) -> int:
    """Run until told to stop; the exit code. Raises `ConfigError` or `StartFailed` with one line when it cannot start."""
    started = time.monotonic()
    set_up_logs(config.log)
    raise_file_limit()
    if not CHECKSUMS_IN_C:
        _log.warning("checksums are made in Python, about 1 MB/s: this google-crc32c has no extension module")
    server = Server(
        config,
        key=read_key(config.storage, environment),
        clock=lambda: time.time_ns() // 1_000_000,
        blipmq_keys=configured(config.blipmq.keys, life.blipmq_keys, environment),
    )
    ready = ReadyFile(life.ready_file) if life.ready_file else None
    if ready:
        ready.clear()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            runner.run(_live(server, config, life, ready, started, environment))
    finally:
        if ready:
            ready.remove()
    return 0


async def _live(
    server: Server, config: Config, life: Life, ready: ReadyFile | None, started: float, environment: Mapping[str, str]
) -> None:
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report_defect)
    stop = asyncio.Event()
    with _signals(loop, stop, ready, server):
        opened = await server.open()
        try:
            if ready:
                ready.write(_by_kind(opened))
            _settle_memory()
            server.report_limits()
            _print_banner(config, opened, server, time.monotonic() - started)
            notify("READY=1", environment)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), life.duration_seconds)
            _log.info("draining")
        finally:
            notify("STOPPING=1", environment)
            if ready:
                ready.remove()
            await server.close()
    _log.info("doors closed", extra=server.figures())
    _log.info("stopped")


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, ready: ReadyFile | None, server: Server) -> Iterator[None]:
    def receive(number: signal.Signals) -> None:
        if stop.is_set():
            if ready:
                ready.remove()
            # Not sys.exit: that would wait for threads, and whoever sends a second signal does not want to wait.
            os._exit(128 + number)
        _log.info("received %s", number.name)
        stop.set()

    for number in _SIGNALS:
        loop.add_signal_handler(number, receive, number)
    loop.add_signal_handler(signal.SIGHUP, server.reload)
    try:
        yield
    finally:
        for number in (*_SIGNALS, signal.SIGHUP):
            loop.remove_signal_handler(number)


def _loop_factory() -> Callable[[], asyncio.AbstractEventLoop]:
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop
    factory: Callable[[], asyncio.AbstractEventLoop] = uvloop.new_event_loop
    return factory


def _report_defect(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A callback failed that nobody awaits: one line, and the broker lives on."""
    _log.error("defect: %s", context["message"], exc_info=context.get("exception"))


def _settle_memory() -> None:
    """What is alive now lives as long as the process: the collector need not look at it again.

    What comes later is mostly columns and futures, which are gone by themselves: looking for cycles among every 700 of them, as is usual,
    takes a tenth of the time of small publishes.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(_COLLECT_AFTER_OBJECTS, 20, 50)


def _by_kind(opened: Sequence[Opened]) -> Mapping[str, Sequence[str]]:
    kinds = dict.fromkeys(found.kind for found in opened)
    return {kind: [found.address for found in opened if found.kind == kind] for kind in kinds}


def _print_banner(config: Config, opened: Sequence[Opened], server: Server, seconds: float) -> None:
    ack = config.storage.ack
    key = ", encrypted" if config.storage.key_file or config.storage.key_env else ""
    lines = [f"headrace {__version__}  data={config.storage.path.absolute()}{key}  ack={ack} ({_PROMISES[ack]})"]
    for found in opened:
        cover = f"  ({found.cover})" if found.cover else ""
        lines.append(f"  {found.kind:<5}{found.address:<22}{' '.join(found.protocols)}{cover}")
    if server.left_out:
        lines.append(f"  {server.left_out}")
    lines.append(f"  access {_ACCESS[config.access.mode]}")
    if server.made_password is not None:
        lines.append(f"  made the user admin, password shown this once:  {server.made_password}")
    if server.made_key is not None:
        path, secret = server.made_key
        lines.append(f"  made a BlipMQ API key, shown this once and kept in {path.absolute()}:  {secret}")
    lines.append(f"ready in {seconds * 1000:.0f} ms, process {os.getpid()}")
    with contextlib.suppress(OSError):  # nobody has to listen
        print("\n".join(lines), file=sys.stdout, flush=True)
    _log.info("ready", extra={"doors": ",".join(found.address for found in opened)})
