"""What is remembered of exactly-once writers, in the table `__sinks`: the last version each has published, and by which of its runs.

A writer (an app) numbers what it publishes. The row with its last version is written in the same append as the records of that version,
so a version is either published and known to be, or neither: whoever is not sure publishes it again, and is told that it was there.

A writer may be started anew while its predecessor still runs somewhere. Each start has a run id, and the first use of a new one
supersedes those before it. That is written down as well; what cannot be known after a restart is listed in `docs/storage.md`.

The name of a writer is only a name. So the row also says to which topics it published last, and who published first in the current run:
whoever acts for the writer may publish to those topics, and only that principal raises the version within the run.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import TypeAlias

import msgspec

from headrace.broker.background import supervise
from headrace.broker.names import check_name
from headrace.broker.tables import TableLog
from headrace.broker.timers import Clock
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, InvalidRequest, LimitExceeded, NotAuthorized, StaleRun
from headrace.limits import SINK_RUNS_REMEMBERED, SINK_VERSION_FIRST_MAX, SINK_VERSION_SKIP_MAX

Key: TypeAlias = tuple[str]


class Rolling(msgspec.Struct, frozen=True, array_like=True):
    """A publication that takes more than one append, and how far it is. Its plan is in the table `__sink_plans`."""

    version: int
    records: int
    rows: int
    """Of its plan."""
    done: int = 0
    """Pieces of the plan that are published."""


class Sink(msgspec.Struct, frozen=True, array_like=True):
    """A row. Stored in this order of fields: new ones go to the end and have a default."""

    version: int | None
    """The last one that is published whole."""
    at: int
    """Unix ms of the last change."""
    run_id: str = ""
    """The run that counts."""
    superseded: tuple[str, ...] = ()
    """Those before it, oldest first."""
    rolling: Rolling | None = None
    remember_ms: int = 0
    """For how long the writer may come back, if it has said so."""
    owner: str = ""
    """The principal who published first in the run that counts; empty where nobody has, or there are no runs."""
    topics: tuple[str, ...] = ()
    """Where the last publication that had records went, `SINK_TOPICS_REMEMBERED` of them at most."""


@dataclass(slots=True, eq=False)
class App:
    """A writer: its row, and what is under way."""

    name: str
    sink: Sink | None = None
    run_id: str = ""
    owner: str = ""
    """Who published first in this run."""
    topics: tuple[str, ...] = ()
    """Where it published last."""
    superseded: deque[str] = field(default_factory=lambda: deque(maxlen=SINK_RUNS_REMEMBERED))
    used_at: int = 0
    handles: set[str] = field(default_factory=set)
    """Its stages."""
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    """Rows are written one after another: each says all that is known, so one that overtakes another would take it back."""
    busy: int = 0
    """Who waits for the lock or has it: as long as there is anybody, this is the app of its name."""
    fence: asyncio.Task[None] | None = None
    """The writing down of a new run."""
    remember_ms: int = 0
    """For how long it may come back; 0: as long as any writer."""
    publications: int = 0
    """How many there were since the broker has known it."""

    @property
    def version(self) -> int | None:
        return None if self.sink is None else self.sink.version

    @property
    def rolling(self) -> Rolling | None:
        return None if self.sink is None else self.sink.rolling

    def check_run(self, run_id: str) -> None:
        """Raises `StaleRun`."""
        if run_id in self.superseded:
            raise StaleRun(app=self.name, run_id=run_id, current=self.run_id)

    def enter(self, run_id: str) -> bool:
        """A run has been heard of. Returns whether it has superseded another; no run id at all supersedes nobody."""
        self.check_run(run_id)
        if not run_id or run_id == self.run_id:
            return False
        before, self.run_id, self.owner = self.run_id, run_id, ""
        if before:
            self.superseded.append(before)
        return bool(before)

    def check_owner(self, name: str, run_id: str) -> None:
        """A run belongs to whom published first in it; whoever takes over starts a run of their own. Raises `NotAuthorized`, `StaleRun`."""
        if not self.run_id or not self.owner or self.owner == name or run_id not in ("", self.run_id):
            return
        if not run_id:
            raise StaleRun(app=self.name, run_id=run_id, current=self.run_id)
        raise NotAuthorized(principal=name, action="publish", resource=f"run {run_id[:80]!r} of transaction {self.name!r}")

    def check_skip(self, version: int) -> None:
        """A version far ahead would have all those up to it answered as published. Raises `InvalidRequest`."""
        last = self.version
        most = SINK_VERSION_FIRST_MAX if last is None else last + max(SINK_VERSION_SKIP_MAX, last)
        if version > most:
            after = "is no first version" if last is None else f"skips far ahead of {last}, the last one"
            raise InvalidRequest(
                f"version {version} of writer {self.name[:80]!r} {after}: at most {most} is accepted now; forget the writer to start anew"
            )

    def forget_runs(self) -> None:
        self.run_id = self.owner = ""
        self.topics = ()
        self.superseded.clear()

    def row(self, version: int | None, now: int, rolling: Rolling | None = None) -> Sink:
        return Sink(version, now, self.run_id, tuple(self.superseded), rolling, self.remember_ms, self.owner, self.topics)


@dataclass(frozen=True, slots=True)
class AppEntry:
    """A writer as it is listed."""

    app: str
    version: int | None
    """The last one published; None if there is none yet."""
    at: int
    """Unix ms of its last change."""
    run_id: str
    is_publishing: bool
    """Whether a publication that takes more than one append is under way."""


class Sinks(TableLog[Key, Sink]):
    """All writers that have published, or are about to. `apps_max` bounds them; `idle_ms` is how long one is remembered."""

    def __init__(self, engine: Engine, *, clock: Clock, apps_max: int, idle_ms: int) -> None:
        super().__init__(engine, "__sinks", Key, Sink)  # type: ignore[arg-type]  # a subscripted tuple is a type to msgspec
        self._clock = clock
        self._apps_max = apps_max
        self._idle_ms = idle_ms
        self.apps: dict[str, App] = {}

    async def load(self) -> None:
        await super().load()
        for app in self.apps.values():
            assert app.sink is not None, "only rows make apps while the table is read"
            app.run_id = app.sink.run_id
            app.superseded.extend(app.sink.superseded)
            app.owner, app.topics = app.sink.owner, app.sink.topics

    def show(self, key: Key, value: Sink | None) -> None:
        (name,) = key
        app = self.apps.get(name)
        if value is None:
            if app is not None:
                app.sink = None
                self.leave(app)
            return
        if app is None:
            app = self.apps[name] = App(name)
        app.sink = value
        app.remember_ms = value.remember_ms
        app.used_at = max(app.used_at, value.at)

    def find(self, name: str) -> App | None:
        return self.apps.get(name)

    def enter(self, name: str) -> App:
        """The app of that name, new if need be. Whoever gives it nothing to do calls `leave`. Raises `InvalidRequest`, `LimitExceeded`."""
        app = self.apps.get(name)
        if app is None:
            check_name("app", name)
            if len(self.apps) >= self._apps_max:
                raise LimitExceeded(f"{self._apps_max} exactly-once writers are remembered already")
            app = self.apps[name] = App(name)
        app.used_at = self._clock()
        return app

    def leave(self, app: App) -> None:
        """Forget one of which nothing is written down and nothing is staged."""
        if app.sink is None and not app.handles and not app.busy and self.apps.get(app.name) is app:
            del self.apps[app.name]

    def entries(self) -> list[AppEntry]:
        """Those with a row, by name."""
        rows = [(app, app.sink) for _, app in sorted(self.apps.items()) if app.sink is not None]
        return [AppEntry(app.name, sink.version, sink.at, sink.run_id, sink.rolling is not None) for app, sink in rows]

    @asynccontextmanager
    async def alone(self, app: App) -> AsyncIterator[None]:
        """Whoever writes its row does it in here."""
        app.busy += 1
        try:
            async with app.lock:
                yield
        finally:
            app.busy -= 1
            self.leave(app)

    async def expire(self) -> None:
        """Forget those that were silent for too long."""
        now = self._clock()
        for app in list(self.apps.values()):
            is_over = app.used_at < now - (app.remember_ms or self._idle_ms)
            if is_over and app.sink is not None and app.rolling is None and not app.handles and not app.busy:
                async with self.alone(app):
                    await self.put([((app.name,), None)])
                    app.forget_runs()

    def fence(self, app: App) -> None:
        """Write down that a run has superseded another. `App.fence` is done when it is durable."""
        app.busy += 1
        app.fence = asyncio.get_running_loop().create_task(self._fence(app))
        supervise(self._engine.health, "notes of superseded writers", app.fence)

    async def _fence(self, app: App) -> None:
        try:
            async with self.alone(app):
                await self.put([((app.name,), app.row(app.version, self._clock(), app.rolling))])
        except BrokerError:
            pass  # it is in memory, and in the row of the next publication
        finally:
            app.busy -= 1
            self.leave(app)


def check_version(version: int) -> None:
    if not 0 <= version < 1 << 63:
        raise InvalidRequest(f"a version is a number from 0 on, not {version}")
