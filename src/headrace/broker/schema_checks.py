"""Schema checks that must not block the event loop.

Small values are checked where they are published. A check that may take longer (`SCHEMA_LOOP_STEPS_MAX`) goes to one process with
limited memory and CPU time (`schemas/worker.py`). It is started on first use and killed when a job takes too long. `publish` is
synchronous, so it raises `SchemaCheckPending`; the session awaits its `ready`, repeats the call, and the verdict is found here.
"""

from __future__ import annotations

import asyncio
import contextlib
import sys
from asyncio.subprocess import DEVNULL, PIPE, Process
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeAlias, TypeVar

import msgspec

from headrace.errors import InvalidSchema, Unavailable
from headrace.limits import (
    SCHEMA_CHECK_CPU_SECONDS_MAX,
    SCHEMA_CHECK_SECONDS_MAX,
    SCHEMA_CHECKS_BYTES_MAX,
    SCHEMA_CHECKS_WAITING_MAX,
    SCHEMA_COMPILE_MS_MAX,
    SCHEMA_LOOP_DEFINITION_BYTES_MAX,
    SCHEMA_LOOP_STEPS_MAX,
)
from headrace.schemas import Compatibility, Schema, SchemaType
from headrace.schemas.worker import LENGTH, Job, Verdict

TOO_EXPENSIVE: Final = f"/: the check exceeds {SCHEMA_CHECK_CPU_SECONDS_MAX} s of CPU time or its memory limit"
_WORKER: Final = ("-m", "headrace.schemas.worker")
_INVALID: Final = "\0invalid"
"""First part of the key of a verdict about a definition that is not a schema."""
_REMEMBERED_MAX: Final = 100_000

_TRIES_MAX: Final = 3
"""Attempts per call: other verdicts may evict one before it is used."""

T = TypeVar("T")
_Key: TypeAlias = tuple[object, ...]


class _Waiting:
    """A job and the keys of its verdicts."""

    __slots__ = ("done", "job", "keys", "size_bytes")

    def __init__(self, job: Job, keys: list[_Key], done: asyncio.Future[None]) -> None:
        self.job, self.keys, self.done = job, keys, done
        self.size_bytes = sum(map(len, job.values)) + len(job.definition)


class SchemaCheckPending(Unavailable):
    """The schema check is too slow for the event loop and runs in the worker process. Await `ready` and repeat the request; other
    callers treat it as `Unavailable` and retry later."""

    def __init__(self, ready: Awaitable[object]) -> None:
        super().__init__("the schema check has not finished: try again")
        self.ready = ready


async def settled(call: Callable[[], T]) -> T:
    """Return the result of the call once its schema check is done. Raises what the call raises."""
    for _ in range(_TRIES_MAX):
        try:
            return call()
        except SchemaCheckPending as pending:
            await pending.ready
    return call()


class SchemaChecks:
    """Used on the event loop."""

    def __init__(self) -> None:
        self._queue: deque[_Waiting] = deque()
        self._started: dict[_Key, asyncio.Future[None]] = {}
        self._answers: dict[_Key, tuple[list[str], int]] = {}
        """Verdicts until they are used, each with the bytes it keeps alive, oldest first."""
        self._held_bytes = 0
        self._task: asyncio.Task[None] | None = None
        self._process: Process | None = None
        self._is_closed = False

    @staticmethod
    def are_small(schema: Schema, values: Sequence[bytes | None]) -> bool:
        """Return whether the values may be checked on the loop."""
        size_bytes = sum(map(len, filter(None, values)))
        return size_bytes * schema.steps_per_byte <= SCHEMA_LOOP_STEPS_MAX

    def faults(self, schema: Schema, values: Sequence[bytes | None]) -> list[list[str]]:
        """Return the faults of each value. Raises `SchemaCheckPending`, `Unavailable`."""
        missing = [value for value in values if value is not None and (schema, value) not in self._answers]
        if missing:
            missing = list(dict.fromkeys(missing))
            self._ask(Job(schema.type, schema.definition, missing), [(schema, value) for value in missing])
        return [[] if value is None else self._answers[schema, value][0] for value in values]

    def conflicts(self, old: Schema | None, type: SchemaType, definition: bytes, mode: Compatibility) -> list[str] | None:
        """Return why the definition cannot follow `old`; None if it is small and may be compared on the loop. Raises `InvalidSchema`, also
        for a definition that takes too long to compile; `SchemaCheckPending`, `Unavailable`."""
        if len(definition) <= SCHEMA_LOOP_DEFINITION_BYTES_MAX and (old is None or len(old.definition) <= SCHEMA_LOOP_DEFINITION_BYTES_MAX):
            return None
        key = (old, type, definition, mode)
        if key not in self._answers:
            self._ask(Job(type, definition, old=None if old is None else (old.type, old.definition), mode=mode), [key])
        found, _ = self._answers[key]
        if found[:1] == [_INVALID]:
            raise InvalidSchema(found[1])
        return found

    def _ask(self, job: Job, keys: list[_Key]) -> None:
        """Queue the job and raise `SchemaCheckPending`."""
        started = self._started.get(keys[0])
        if started is None or started.done():
            started = self._start(job, keys)
        raise SchemaCheckPending(asyncio.shield(started))

    def _start(self, job: Job, keys: list[_Key]) -> asyncio.Future[None]:
        if self._is_closed:
            raise Unavailable("the broker is draining")
        waiting = _Waiting(job, keys, asyncio.get_running_loop().create_future())
        held_bytes = sum(one.size_bytes for one in self._queue)
        if len(self._queue) >= SCHEMA_CHECKS_WAITING_MAX or (self._queue and held_bytes + waiting.size_bytes > SCHEMA_CHECKS_BYTES_MAX):
            raise Unavailable(f"{len(self._queue)} schema checks of {held_bytes} bytes are waiting already")
        self._queue.append(waiting)
        for key in keys:
            self._started[key] = waiting.done
        if self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._work())
        return waiting.done

    async def _work(self) -> None:
        try:
            while self._queue:
                waiting = self._queue[0]
                verdict = await self._checked(waiting.job)
                self._queue.popleft()
                self._remember(waiting, verdict)
        finally:
            self._task = None
            self._release_waiting()

    def _release_waiting(self) -> None:
        """Wake the waiting callers; each repeats its call and gets the answer then."""
        for waiting in self._queue:
            if not waiting.done.done():
                waiting.done.set_result(None)
        self._queue.clear()
        self._started.clear()

    def _remember(self, waiting: _Waiting, verdict: Verdict) -> None:
        if verdict.invalid:
            faults = [[_INVALID, verdict.invalid]] if waiting.job.mode is not None else [[f"/: {verdict.invalid}"]] * len(waiting.keys)
        else:
            faults = verdict.faults
        for key, found in zip(waiting.keys, faults, strict=True):
            self._started.pop(key, None)
            self._forget(key)
            size_bytes = sum(len(part) for part in key if isinstance(part, bytes))
            self._answers[key] = found, size_bytes
            self._held_bytes += size_bytes
        own = len(waiting.keys)
        while len(self._answers) > own and (self._held_bytes > SCHEMA_CHECKS_BYTES_MAX or len(self._answers) > _REMEMBERED_MAX):
            self._forget(next(iter(self._answers)))
        if not waiting.done.done():
            waiting.done.set_result(None)

    def _forget(self, key: _Key) -> None:
        known = self._answers.pop(key, None)
        if known is not None:
            self._held_bytes -= known[1]

    def used(self, schema: Schema, values: Sequence[bytes | None]) -> None:
        """Drop the verdicts of values that are about to be appended."""
        for value in values:
            self._forget((schema, value))

    # The worker process

    async def _checked(self, job: Job) -> Verdict:
        count = len(job.values)
        try:
            async with asyncio.timeout(SCHEMA_CHECK_SECONDS_MAX):
                verdict = await self._exchange(job)
        except (TimeoutError, OSError, EOFError):
            await self._kill()
            return Verdict([[TOO_EXPENSIVE]] * count, invalid=TOO_EXPENSIVE if job.mode is not None else "")
        if verdict.cpu_ms > SCHEMA_COMPILE_MS_MAX:
            return Verdict(invalid=f"the schema takes more than {SCHEMA_COMPILE_MS_MAX} ms to compile")
        return verdict

    async def _exchange(self, job: Job) -> Verdict:
        if self._process is None:
            self._process = await asyncio.create_subprocess_exec(sys.executable, *_WORKER, stdin=PIPE, stdout=PIPE, stderr=DEVNULL)
        writer, reader = self._process.stdin, self._process.stdout
        assert writer is not None and reader is not None
        request = msgspec.msgpack.encode(job)
        writer.write(LENGTH.pack(len(request)))
        writer.write(request)
        await writer.drain()
        (size,) = LENGTH.unpack(await reader.readexactly(LENGTH.size))
        return msgspec.msgpack.decode(await reader.readexactly(size), type=Verdict)

    async def _kill(self) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            process.kill()
        if process.stdin is not None:
            process.stdin.close()
        await process.wait()

    async def close(self) -> None:
        """Kill the process. Waiting callers repeat their call and get an error: the broker is draining."""
        self._is_closed = True
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task
        await self._kill()
