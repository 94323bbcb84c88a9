"""Delivery state of one group and topic, common to all its settlement queues.

The consumers of a group split the work because they take from the same `PartitionProgress` objects. `GroupConsumer` watches the
partitions, redelivers overdue records, moves records without attempts left to the dead letters, and commits the group's progress in the
background: the lowest unsettled offset of each partition, many steps in one commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.broker.dead_letters.dead_letters import DeadLetter, DeadLetters
from headrace.broker.groups.offsets import Groups
from headrace.broker.groups.progress import Entry, Holder, PartitionProgress, Row, State, rows_of
from headrace.broker.health import supervise
from headrace.broker.reading.waits import Wait
from headrace.broker.settings import Clock, Later, Timer
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, OffsetOutOfRange

_STOCK_BYTES: Final = 256 * 1024
_REREAD_BYTES: Final = 64 * 1024
"""A redelivery reads a little more than one record, because adjacent records are often redelivered together."""
_RETRY_SECONDS: Final = 1.0
"""Pause after a failed commit or dead-letter append. Unsettled records keep their state, so a retry loses nothing."""
_MOVES_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class GroupContext:
    """Parts of the broker that every `GroupConsumer` needs."""

    engine: Engine
    groups: Groups
    dead_letters: DeadLetters
    clock: Clock
    later: Later
    commit_ms: int


class Taking:
    """Deliveries of one call so far, and its remaining capacity."""

    __slots__ = ("bytes_left", "holder", "records_left", "taken")

    def __init__(self, holder: Holder, records_max: int, bytes_max: int) -> None:
        self.holder = holder
        self.records_left = min(records_max, holder.in_flight_max - len(holder.in_flight))
        self.bytes_left = bytes_max
        self.taken: list[tuple[Entry, Row]] = []

    @property
    def is_full(self) -> bool:
        return self.records_left <= 0 or self.bytes_left <= 0

    def fits(self, row: Row) -> bool:
        """Return whether the record fits. The first one always does, whatever its size."""
        return not self.taken or row.size_bytes <= self.bytes_left

    def add(self, entry: Entry, row: Row) -> None:
        self.taken.append((entry, row))
        self.records_left -= 1
        self.bytes_left -= row.size_bytes


class GroupConsumer:
    """Consumes a topic on behalf of a group; the queues of the group take from it. `done` is called when no queue needs it."""

    def __init__(self, context: GroupContext, group: str, topic: str, done: Callable[[GroupConsumer], None]) -> None:
        self.group, self.topic = group, topic
        self.partitions: dict[int, PartitionProgress] = {}
        self.waits: set[Wait] = set()
        self.error: BrokerError | None = None
        self.is_draining = False
        self.takes_all = False
        """Whether a queue takes from all partitions, including those added later."""
        self._is_over = False
        self._context = context
        self._done = done
        self._holders: list[Holder] = []
        self._entries: dict[int, Entry] = {}
        self._last_id = 0
        self._locks: dict[int, asyncio.Lock] = {}
        self._unwatch: list[Callable[[], None]] = []
        self._timer: Timer | None = None
        self._timer_at = 0
        self._commit_timer: Timer | None = None
        self._commit_lock = asyncio.Lock()
        self._dead: list[Entry] = []
        self._moving_dead: asyncio.Task[None] | None = None
        self._retry_timer: Timer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # Members

    def add_partition(self, partition: int, position: int) -> None:
        self.partitions[partition] = PartitionProgress(
            partition, position, self._context.groups.committed(self.group, self.topic, partition)
        )
        self._locks[partition] = asyncio.Lock()
        self._unwatch.append(self._context.engine.watch(self.topic, partition, self.wake))
        # Commit the first position too: a consumer that stops before its first ack must resume at the same place.
        self._progressed()
        self.wake()

    def join(self, holder: Holder) -> None:
        self._holders.append(holder)

    def leave(self, holder: Holder) -> asyncio.Future[None]:
        """Requeue what the holder has in flight. Resolves when the progress is committed or the commit has failed."""
        self._holders.remove(holder)
        now = self._context.clock()
        for entry in list(holder.in_flight.values()):
            if holder.policy.dead_letters and not self.is_draining:
                self._failed(entry, 0, "consumer left")
            else:
                entry.progress.wait(entry, now)
        for entry in self._entries.values():
            if entry.holder is holder:
                entry.holder = None
        self.wake()
        return self._spawn(self._finish())

    async def _finish(self) -> None:
        if self._moving_dead is not None:
            await asyncio.wait([self._moving_dead])
        try:
            await self.commit()
        except BrokerError:
            pass  # uncommitted records are delivered again
        if not self._holders and not self._is_over:
            self._stop()
            self._done(self)

    def fail(self, error: BrokerError) -> None:
        """End all waits with the error and stop committing: the topic is deleted."""
        self.error = error
        for wait in self.waits:
            wait.end(error)
        self._stop()
        self._done(self)

    async def drain(self) -> None:
        """Deliver nothing more, finish the moves to the dead letters, commit."""
        self.is_draining = True
        for wait in self.waits:
            wait.end()
        await self._finish()
        self._stop()

    def _stop(self) -> None:
        """Cancel all timers and commits: a successor may already own the group."""
        self._is_over = True
        for stop in self._unwatch:
            stop()
        self._unwatch.clear()
        for timer in (self._timer, self._commit_timer, self._retry_timer):
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """Wake the waiting queues: there may be records to take."""
        for wait in self.waits:
            wait.wake()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Keep a reference to the task: the loop has only weak ones."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        supervise(self._context.engine.health, "settlement", task)
        return task

    # Taking

    async def take(self, taking: Taking, partitions: Sequence[PartitionProgress]) -> None:
        """Take what is ready. In each partition redeliveries come first, then new records."""
        try:
            for progress in partitions:
                if taking.is_full:
                    break
                async with self._locks[progress.partition]:
                    await self._take_again(taking, progress)
                    await self._take_new(taking, progress)
        except (asyncio.CancelledError, BrokerError):
            # The caller was cancelled and never sees these deliveries, so they do not count as attempts.
            for entry, _ in taking.taken:
                if entry.state is State.IN_FLIGHT:
                    entry.attempt -= 1
                    entry.progress.wait(entry, self._context.clock())
            self.wake()
            raise
        if taking.taken:
            self._set_timer(self._context.clock() + taking.holder.policy.ack_timeout_ms)

    async def _take_again(self, taking: Taking, progress: PartitionProgress) -> None:
        due = progress.pop_due(self._context.clock(), taking.records_left)
        if not due:
            return
        try:
            rows = await self._bodies(progress, due)
            now = self._context.clock()
            for entry in due:
                if entry.state is not State.WAITING:
                    continue  # acked late, while its body was read
                row = rows.get(entry.offset)
                if row is None or row.is_expired(now):
                    self.settle(entry)
                elif not taking.fits(row):
                    break
                else:
                    progress.deliver(entry, taking.holder, now)
                    taking.add(entry, row)
        finally:
            for entry in due:
                if entry.state is State.WAITING:
                    progress.requeue(entry)
        if (time := progress.next_due()) is not None and time > now:
            self._set_timer(time)

    async def _take_new(self, taking: Taking, progress: PartitionProgress) -> None:
        """Take until the caller has enough: the buffer may end before that."""
        while not taking.is_full:
            if not progress.buffered:
                await self._fill_buffer(progress)
            if not progress.buffered:
                return
            self._take_buffered(taking, progress)
            if progress.buffered:
                return

    def _take_buffered(self, taking: Taking, progress: PartitionProgress) -> None:
        now = self._context.clock()
        room = sum(holder.in_flight_max for holder in self._holders) - len(self._entries)
        while progress.buffered and room > 0 and taking.records_left > 0 and taking.fits(progress.buffered[0]):
            row = progress.buffered.popleft()
            if row.is_expired(now):
                self._progressed()
                continue
            self._last_id += 1
            entry = self._entries[self._last_id] = progress.deliver_new(self._last_id, row, taking.holder, now)
            taking.add(entry, row)
            room -= 1

    async def _fill_buffer(self, progress: PartitionProgress) -> None:
        engine = self._context.engine
        while not progress.buffered and progress.position < (end := engine.bounds(self.topic, progress.partition).end):
            try:
                batches = await engine.read(self.topic, progress.partition, progress.position, bytes_max=_STOCK_BYTES)
            except OffsetOutOfRange as error:
                # Retention deleted records that the group had not read. Continue at the first offset.
                progress.position = max(progress.position + 1, error.first)
            else:
                # An empty read below the end means that compaction removed these records.
                progress.add_buffered(batches, batches[-1].next_offset if batches else end)
            self._progressed()

    async def _bodies(self, progress: PartitionProgress, entries: Iterable[Entry]) -> dict[int, Row]:
        """Read the records of these entries again. Records removed by retention or compaction are missing."""
        rows: dict[int, Row] = {}
        for offset in sorted(entry.offset for entry in entries):
            if offset in rows:
                continue
            try:
                batches = await self._context.engine.read(self.topic, progress.partition, offset, bytes_max=_REREAD_BYTES)
            except OffsetOutOfRange:
                continue
            for batch in batches:
                rows.update((row.offset, row) for row in rows_of(batch))
        return rows

    # Settling

    def held(self, holder: Holder, id: int) -> Entry | None:
        """Return the entry if this holder received it last."""
        entry = self._entries.get(id)
        return entry if entry is not None and entry.holder is holder else None

    def settle(self, entry: Entry) -> None:
        del self._entries[entry.id]
        entry.progress.settle(entry)
        self._progressed()
        self.wake()

    def nack(self, entry: Entry, delay_ms: int | None) -> None:
        """Redeliver a record after a delay. The delay of a record that is already waiting starts again."""
        assert entry.holder is not None, "only its holder nacks a record"
        if entry.state is not State.DEAD:
            self._failed(entry, entry.holder.policy.backoff(entry.attempt) if delay_ms is None else delay_ms, "refused")

    def reject(self, entry: Entry, reason: str) -> None:
        """Move the record to the dead letters now, whatever attempts are left. Without dead letters it counts as settled."""
        assert entry.holder is not None, "only its holder rejects a record"
        if not entry.holder.policy.dead_letters:
            self.settle(entry)
        elif entry.state is not State.DEAD:
            entry.failed(self._context.clock())
            self._give_up(entry, reason)

    def check_overdue(self) -> None:
        """Redeliver records whose ack is overdue."""
        now = self._context.clock()
        for holder in self._holders:
            while (entry := holder.first_overdue()) is not None and entry.time <= now:
                self._failed(entry, 0, "timed out")

    def _failed(self, entry: Entry, delay_ms: int, reason: str) -> None:
        assert entry.holder is not None
        policy = entry.holder.policy
        entry.failed(self._context.clock())
        if not policy.is_exhausted(entry.attempt):
            entry.progress.wait(entry, self._context.clock() + delay_ms)
            self._set_timer(entry.time)
        elif policy.dead_letters:
            self._give_up(entry, reason)
        else:
            self.settle(entry)
        self.wake()

    def _give_up(self, entry: Entry, reason: str) -> None:
        entry.progress.mark_dead(entry, reason)
        self._dead.append(entry)
        self._start_moving_dead()

    # One timer for the next time-out or redelivery. It may fire for a record settled since; then it is set again.

    def _set_timer(self, time: int) -> None:
        if self._timer is not None:
            if self._timer_at <= time:
                return
            self._timer.cancel()
        if not self._is_over:
            self._timer_at = time
            self._timer = self._context.later(max(0, time - self._context.clock()) / 1000, self._on_timer)

    def _on_timer(self) -> None:
        self._timer = None
        self.check_overdue()
        now = self._context.clock()
        times = [time for progress in self.partitions.values() if (time := progress.next_due()) is not None]
        if any(time <= now for time in times):
            self.wake()  # no timer for these: they wait for a consumer to take them
        times += (entry.time for holder in self._holders if (entry := holder.first_overdue()) is not None)
        if (soonest := min((time for time in times if time > now), default=None)) is not None:
            self._set_timer(soonest)

    # Dead letters

    def _start_moving_dead(self) -> None:
        if self._moving_dead is None and self._retry_timer is None and not self._is_over:
            self._moving_dead = self._spawn(self._move_all_dead())

    async def _move_all_dead(self) -> None:
        try:
            while self._dead and not self._is_over:
                await self._move_dead(self._dead[:_MOVES_AT_ONCE])
        except Exception as failure:
            if not self._is_over:
                self._retry_timer = self._context.later(_RETRY_SECONDS, self._retry_moving)
            if not isinstance(failure, BrokerError):
                raise
        finally:
            self._moving_dead = None

    def _retry_moving(self) -> None:
        self._retry_timer = None
        self._start_moving_dead()

    async def _move_dead(self, dead: Sequence[Entry]) -> None:
        letters: list[DeadLetter] = []
        for partition in sorted({entry.progress.partition for entry in dead}):
            mine = [entry for entry in dead if entry.progress.partition == partition]
            rows = await self._bodies(self.partitions[partition], mine)
            letters += (_letter(entry, rows[entry.offset]) for entry in mine if entry.offset in rows)
        if letters:
            await self._context.dead_letters.append(self.topic, letters)
        del self._dead[: len(dead)]
        for entry in dead:
            if entry.state is State.DEAD:
                self.settle(entry)

    # Committing

    def _progressed(self) -> None:
        self._commit_within(self._context.commit_ms / 1000)

    def _commit_within(self, seconds: float) -> None:
        if self._commit_timer is None and not self._is_over:
            self._commit_timer = self._context.later(seconds, self._commit_in_background)

    def _commit_in_background(self) -> None:
        self._commit_timer = None
        self._spawn(self._try_commit())

    async def _try_commit(self) -> None:
        try:
            await self.commit()
        except Exception as failure:
            self._commit_within(_RETRY_SECONDS)
            if not isinstance(failure, BrokerError):
                raise

    async def commit(self) -> None:
        """Commit everything settled so far."""
        async with self._commit_lock:
            floors = {
                (self.topic, progress.partition): progress.floor
                for progress in self.partitions.values()
                if progress.floor != progress.committed
            }
            if not floors or self._is_over:
                return
            groups = self._context.groups
            await groups.put(groups.commits(self.group, floors))
            for (_, partition), floor in floors.items():
                self.partitions[partition].committed = floor


def _letter(entry: Entry, row: Row) -> DeadLetter:
    return DeadLetter(row, entry.progress.partition, entry.attempt, entry.reason, entry.first_failure, entry.last_failure)
