"""Broker process: start, serve, drain, exit.

The first SIGTERM or SIGINT drains: the broker accepts no new connections, finishes and acknowledges the requests it has received, then
exits with code 0. A second signal exits immediately, like a crash: everything acknowledged is on disk. SIGHUP reloads the certificates.
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
from functools import partial
from pathlib import Path
from typing import Any, Final

from headrace import __version__
from headrace.heap import keep_large_chunks
from headrace.records import Ack
from headrace.server.api_keys import configured, read_key
from headrace.server.config import Config
from headrace.server.descriptors import raise_file_limit
from headrace.server.kafka import EngineKind
from headrace.server.logs import set_up_logs
from headrace.server.ready import ReadyFile, notify
from headrace.server.settings import AccessMode
from headrace.server.switching import switch_threads, wake_precisely
from headrace.server.wiring import Opened, Server
from headrace.storage.batch import CHECKSUMS_IN_C

_log = logging.getLogger(__name__)
_SIGNALS: Final = (signal.SIGTERM, signal.SIGINT)
_ACCESS: Final = {
    AccessMode.OPEN: "open: every client may do everything (access.mode)",
    AccessMode.ENFORCED: "enforced: users, rules and API keys decide",
}
_COLLECT_AFTER_OBJECTS: Final = 20_000
"""A collection of this many objects takes about a millisecond."""
_PROMISES: Final = {
    Ack.DURABLE: "fdatasync before every acknowledgement",
    Ack.WRITTEN: "survives a crash of the process, not of the machine",
    Ack.NONE: "may be lost at any time",
}


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Command-line options of `headrace serve` that are not part of the configuration."""

    ready_file: Path | None = None
    duration_seconds: float | None = None
    """Drain after this time; None: only on a signal."""
    blipmq_keys: tuple[str, ...] = ()
    """API keys or references to them. They never become part of the configuration."""

    def __repr__(self) -> str:
        return f"ServeOptions(ready_file={self.ready_file}, duration_seconds={self.duration_seconds}, {len(self.blipmq_keys)} keys)"


def serve(config: Config, options: ServeOptions, environment: Mapping[str, str]) -> int:
    """Run the broker until a signal and return the exit code. Raises `ConfigError` or `StartFailed` with one line if it cannot start."""
    started = time.monotonic()
    set_up_logs(config.logging)
    raise_file_limit()
    switch_threads()
    wake_precisely()
    keep_large_chunks()
    if not CHECKSUMS_IN_C:
        _log.warning("checksums are slow: about 1 MB/s in Python, because the installed google-crc32c has no extension module")
    make = partial(
        Server,
        config,
        key=read_key(config.storage, environment),
        clock=lambda: time.time_ns() // 1_000_000,
        blipmq_keys=configured(config.blipmq.keys, options.blipmq_keys, environment),
    )
    server = make()  # reports a wrong setting before the event loop starts
    ready = ReadyFile(options.ready_file) if options.ready_file else None
    if ready:
        ready.clear()
    try:
        with asyncio.Runner(loop_factory=_loop_factory()) as runner:
            while runner.run(_run(server, config, options, ready, started, environment)):
                _log.warning("another broker is the coordinator now; starting again")
                server, started = make(), time.monotonic()
    finally:
        if ready:
            ready.remove()
    return 0


async def _run(
    server: Server, config: Config, options: ServeOptions, ready: ReadyFile | None, started: float, environment: Mapping[str, str]
) -> bool:
    """Serve until a signal. Returns True if another broker has taken over as the coordinator instead: this one starts again, to read the
    tables again."""
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(_report_defect)
    stop = asyncio.Event()
    server.lost = stop.set
    with _signals(loop, stop, ready, server):
        opened = await _opened(server, stop)
        if opened is None:
            return False
        try:
            if ready:
                ready.write(_by_kind(opened))
            _freeze_memory()
            server.report_limits()
            _print_banner(config, opened, server, time.monotonic() - started)
            notify("READY=1", environment)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(stop.wait(), options.duration_seconds)
            _log.info("draining" if not server.is_lost else "closing: another broker is the coordinator")
        finally:
            notify("STOPPING=1", environment)
            if ready:
                ready.remove()
            await server.close()
    _log.info("protocols closed", extra=server.figures())
    if not server.is_lost:
        _log.info("stopped")
    return server.is_lost


async def _opened(server: Server, stop: asyncio.Event) -> list[Opened] | None:
    """Open the server; None if a signal comes first: an election may take seconds."""
    opening, stopping = asyncio.ensure_future(server.open()), asyncio.ensure_future(stop.wait())
    await asyncio.wait([opening, stopping], return_when=asyncio.FIRST_COMPLETED)
    stopping.cancel()
    if opening.done():
        return opening.result()
    opening.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await opening
    return None


@contextlib.contextmanager
def _signals(loop: asyncio.AbstractEventLoop, stop: asyncio.Event, ready: ReadyFile | None, server: Server) -> Iterator[None]:
    def receive(number: signal.Signals) -> None:
        if stop.is_set():
            if ready:
                ready.remove()
            # sys.exit would wait for threads.
            os._exit(128 + number)
        _log.info("signal received", extra={"signal": number.name})
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
    """Log a failed callback in one line. The broker continues."""
    fields = {"what": context["message"]} | {name: context[name] for name in ("peer", "request") if name in context}
    _log.error("defect", extra=fields, exc_info=context.get("exception"))


def _freeze_memory() -> None:
    """Exclude the objects of the start from garbage collection: they live as long as the process.

    Later objects are mostly columns and futures without cycles. Collecting after every 700 of them, the default, takes a tenth of the
    time of small publishes.
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
    is_kafka = config.storage.engine is EngineKind.KAFKA
    place = f"kafka={config.kafka.bootstrap}" if is_kafka else f"data={config.storage.path.absolute()}"
    promise = "all in-sync replicas have it" if is_kafka and ack is Ack.DURABLE else _PROMISES[ack]
    lines = [f"headrace {__version__}  {place}{key}  ack={ack} ({promise})"]
    for found in opened:
        encryption = f"  ({found.encryption})" if found.encryption else ""
        lines.append(f"  {found.kind:<7}{found.address:<22}{' '.join(found.protocols)}{encryption}")
    lines += [f"  {line}" for line in server.unavailable]
    if is_kafka:
        lines.append(f"  {'coordinator' if server.is_coordinator else 'publishes and reads; another broker is the coordinator'}")
    lines.append(f"  access {_ACCESS[config.access.mode]}")
    if server.generated_password is not None:
        lines.append(f"  created the user admin, password shown this once:  {server.generated_password}")
    if server.generated_key is not None:
        path, secret = server.generated_key
        lines.append(f"  generated a BlipMQ API key, shown this once and stored in {path.absolute()}:  {secret}")
    lines.append(f"ready in {seconds * 1000:.0f} ms, process {os.getpid()}")
    with contextlib.suppress(OSError):  # stdout may be closed
        print("\n".join(lines), file=sys.stdout, flush=True)
    _log.info("ready", extra={"protocols": ",".join(found.address for found in opened)})
