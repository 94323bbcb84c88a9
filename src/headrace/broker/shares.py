"""A share: the state that all settlement queues of one group and topic have in common.

Consumers of one group split the work because they draw from the same lanes. The share watches the partitions, turns overdue
deliveries into redeliveries, buries those that used up their attempts, and commits the group's progress: the lowest unsettled
offset of each lane, in the background, many steps in one commit.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from headrace.broker.background import supervise
from headrace.broker.dead_letters import DeadLetter, DeadLetters
from headrace.broker.groups import Groups
from headrace.broker.lanes import Entry, Holder, Lane, Row, State, rows_of
from headrace.broker.timers import Clock, Later, Timer
from headrace.broker.waits import Wait
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, OffsetOutOfRange

_STOCK_BYTES: Final = 256 * 1024
_REREAD_BYTES: Final = 64 * 1024
"""Neighbours often come again together, so a redelivery reads a little more than its own record."""
_RETRY_SECONDS: Final = 1.0
"""After the log refused a commit or a dead letter: what is unsettled keeps its place, so nothing is lost by trying again."""
_BURIALS_AT_ONCE: Final = 100


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What every share needs from the broker."""

    engine: Engine
    groups: Groups
    dead_letters: DeadLetters
    clock: Clock
    later: Later
    commit_ms: int


class Taking:
    """What one call has taken so far, and what it still has room for."""

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
        """The first one always does, however large."""
        return not self.taken or row.size_bytes <= self.bytes_left

    def add(self, entry: Entry, row: Row) -> None:
        self.taken.append((entry, row))
        self.records_left -= 1
        self.bytes_left -= row.size_bytes


class Share:
    """`done` is called when nobody needs it any more."""

    def __init__(self, around: Surroundings, group: str, topic: str, done: Callable[[Share], None]) -> None:
        self.group, self.topic = group, topic
        self.lanes: dict[int, Lane] = {}
        self.waits: set[Wait] = set()
        self.error: BrokerError | None = None
        self.is_draining = False
        self.takes_all = False
        """Whether a queue takes from all partitions, those to be added later too."""
        self._is_over = False
        self._around = around
        self._done = done
        self._holders: list[Holder] = []
        self._entries: dict[int, Entry] = {}
        self._last_id = 0
        self._locks: dict[int, asyncio.Lock] = {}
        self._unwatch: list[Callable[[], None]] = []
        self._alarm: Timer | None = None
        self._alarm_at = 0
        self._commit_timer: Timer | None = None
        self._commit_lock = asyncio.Lock()
        self._dead: list[Entry] = []
        self._burying: asyncio.Task[None] | None = None
        self._bury_timer: Timer | None = None
        self._tasks: set[asyncio.Task[None]] = set()

    # Who takes part

    def add_lane(self, partition: int, position: int) -> None:
        self.lanes[partition] = Lane(partition, position, self._around.groups.committed(self.group, self.topic, partition))
        self._locks[partition] = asyncio.Lock()
        self._unwatch.append(self._around.engine.watch(self.topic, partition, self.wake))
        # The first position is committed as well: a consumer that dies before its first ack must find its place again.
        self._progressed()
        self.wake()

    def join(self, holder: Holder) -> None:
        self._holders.append(holder)

    def leave(self, holder: Holder) -> asyncio.Future[None]:
        """What the holder has in flight goes back. Resolves when the progress is committed, or cannot be."""
        self._holders.remove(holder)
        now = self._around.clock()
        for entry in list(holder.in_flight.values()):
            if holder.policy.dead_letters and not self.is_draining:
                self._failed(entry, 0, "consumer left")
            else:
                entry.lane.wait(entry, now)
        for entry in self._entries.values():
            if entry.holder is holder:
                entry.holder = None
        self.wake()
        return self._spawn(self._finish())

    async def _finish(self) -> None:
        if self._burying is not None:
            await asyncio.wait([self._burying])
        try:
            await self.commit()
        except BrokerError:
            pass  # what is not committed will be delivered again
        if not self._holders and not self._is_over:
            self._stop()
            self._done(self)

    def fail(self, error: BrokerError) -> None:
        """The topic is gone: whoever waits is told, nothing is committed any more."""
        self.error = error
        for wait in self.waits:
            wait.end(error)
        self._stop()
        self._done(self)

    async def drain(self) -> None:
        """Give out nothing more, finish what is being buried, commit."""
        self.is_draining = True
        for wait in self.waits:
            wait.end()
        await self._finish()
        self._stop()

    def _stop(self) -> None:
        """No timers and no commits after this: a successor may have taken over the group."""
        self._is_over = True
        for stop in self._unwatch:
            stop()
        self._unwatch.clear()
        for timer in (self._alarm, self._commit_timer, self._bury_timer):
            if timer is not None:
                timer.cancel()

    def wake(self) -> None:
        """There may be something to take that was not there before."""
        for wait in self.waits:
            wait.wake()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """The loop keeps only weak references to its tasks."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        supervise(self._around.engine.health, "settlement", task)
        return task

    # Taking

    async def take(self, taking: Taking, lanes: Sequence[Lane]) -> None:
        """What is ready: in each lane first what is to come again, then what is new."""
        try:
            for lane in lanes:
                if taking.is_full:
                    break
                async with self._locks[lane.partition]:
                    await self._take_again(taking, lane)
                    await self._take_new(taking, lane)
        except (asyncio.CancelledError, BrokerError):
            # Nobody will hear of these deliveries, so they do not count.
            for entry, _ in taking.taken:
                if entry.state is State.IN_FLIGHT:
                    entry.attempt -= 1
                    entry.lane.wait(entry, self._around.clock())
            self.wake()
            raise
        if taking.taken:
            self._ring_by(self._around.clock() + taking.holder.policy.ack_timeout_ms)

    async def _take_again(self, taking: Taking, lane: Lane) -> None:
        due = lane.pop_due(self._around.clock(), taking.records_left)
        if not due:
            return
        try:
            rows = await self._bodies(lane, due)
            now = self._around.clock()
            for entry in due:
                if entry.state is not State.WAITING:
                    continue  # acked late, while its body was read
                row = rows.get(entry.offset)
                if row is None or row.is_expired(now):
                    self.settle(entry)
                elif not taking.fits(row):
                    break
                else:
                    lane.deliver(entry, taking.holder, now)
                    taking.add(entry, row)
        finally:
            for entry in due:
                if entry.state is State.WAITING:
                    lane.requeue(entry)
        if (time := lane.next_due()) is not None and time > now:
            self._ring_by(time)

    async def _take_new(self, taking: Taking, lane: Lane) -> None:
        """Take until the caller has enough: what was read ahead may end in the middle of what is wanted."""
        while not taking.is_full:
            if not lane.stock:
                await self._restock(lane)
            if not lane.stock:
                return
            self._take_stock(taking, lane)
            if lane.stock:
                return

    def _take_stock(self, taking: Taking, lane: Lane) -> None:
        now = self._around.clock()
        room = sum(holder.in_flight_max for holder in self._holders) - len(self._entries)
        while lane.stock and room > 0 and taking.records_left > 0 and taking.fits(lane.stock[0]):
            row = lane.stock.popleft()
            if row.is_expired(now):
                self._progressed()
                continue
            self._last_id += 1
            entry = self._entries[self._last_id] = lane.deliver_new(self._last_id, row, taking.holder, now)
            taking.add(entry, row)
            room -= 1

    async def _restock(self, lane: Lane) -> None:
        engine = self._around.engine
        while not lane.stock and lane.position < (end := engine.bounds(self.topic, lane.partition).end):
            try:
                batches = await engine.read(self.topic, lane.partition, lane.position, bytes_max=_STOCK_BYTES)
            except OffsetOutOfRange as error:
                # Retention has overtaken the group: what it had not read is gone, the rest is still there.
                lane.position = max(lane.position + 1, error.first)
            else:
                # An empty read below the end means that compaction has left nothing there.
                lane.add_stock(batches, batches[-1].next_offset if batches else end)
            self._progressed()

    async def _bodies(self, lane: Lane, entries: Iterable[Entry]) -> dict[int, Row]:
        """The records of these entries, read again. What retention or compaction took away is missing."""
        rows: dict[int, Row] = {}
        for offset in sorted(entry.offset for entry in entries):
            if offset in rows:
                continue
            try:
                batches = await self._around.engine.read(self.topic, lane.partition, offset, bytes_max=_REREAD_BYTES)
            except OffsetOutOfRange:
                continue
            for batch in batches:
                rows.update((row.offset, row) for row in rows_of(batch))
        return rows

    # Settling

    def held(self, holder: Holder, id: int) -> Entry | None:
        """The entry, if this holder was the last to get it."""
        entry = self._entries.get(id)
        return entry if entry is not None and entry.holder is holder else None

    def settle(self, entry: Entry) -> None:
        del self._entries[entry.id]
        entry.lane.settle(entry)
        self._progressed()
        self.wake()

    def refuse(self, entry: Entry, delay_ms: int | None) -> None:
        """A nack. A record that waits already waits anew."""
        assert entry.holder is not None, "only its holder refuses a record"
        if entry.state is not State.DEAD:
            self._failed(entry, entry.holder.policy.backoff(entry.attempt) if delay_ms is None else delay_ms, "refused")

    def reject(self, entry: Entry, reason: str) -> None:
        """To the dead letters now, whatever attempts are left. Where none are kept, it counts as settled."""
        assert entry.holder is not None, "only its holder rejects a record"
        if not entry.holder.policy.dead_letters:
            self.settle(entry)
        elif entry.state is not State.DEAD:
            entry.failed(self._around.clock())
            self._give_up(entry, reason)

    def check_overdue(self) -> None:
        """Deliveries whose ack is overdue come again at once."""
        now = self._around.clock()
        for holder in self._holders:
            while (entry := holder.first_overdue()) is not None and entry.time <= now:
                self._failed(entry, 0, "timed out")

    def _failed(self, entry: Entry, delay_ms: int, reason: str) -> None:
        assert entry.holder is not None
        policy = entry.holder.policy
        entry.failed(self._around.clock())
        if not policy.is_exhausted(entry.attempt):
            entry.lane.wait(entry, self._around.clock() + delay_ms)
            self._ring_by(entry.time)
        elif policy.dead_letters:
            self._give_up(entry, reason)
        else:
            self.settle(entry)
        self.wake()

    def _give_up(self, entry: Entry, reason: str) -> None:
        entry.lane.bury(entry, reason)
        self._dead.append(entry)
        self._bury()

    # The alarm: one timer for the next time-out or redelivery. It may ring for something settled since; then it is set anew.

    def _ring_by(self, time: int) -> None:
        if self._alarm is not None:
            if self._alarm_at <= time:
                return
            self._alarm.cancel()
        if not self._is_over:
            self._alarm_at = time
            self._alarm = self._around.later(max(0, time - self._around.clock()) / 1000, self._ring)

    def _ring(self) -> None:
        self._alarm = None
        self.check_overdue()
        now = self._around.clock()
        times = [time for lane in self.lanes.values() if (time := lane.next_due()) is not None]
        if any(time <= now for time in times):
            self.wake()  # no alarm for these: they wait for somebody to take them
        times += (entry.time for holder in self._holders if (entry := holder.first_overdue()) is not None)
        if (soonest := min((time for time in times if time > now), default=None)) is not None:
            self._ring_by(soonest)

    # Dead letters

    def _bury(self) -> None:
        if self._burying is None and self._bury_timer is None and not self._is_over:
            self._burying = self._spawn(self._bury_all())

    async def _bury_all(self) -> None:
        try:
            while self._dead and not self._is_over:
                await self._bury_some(self._dead[:_BURIALS_AT_ONCE])
        except Exception as failure:
            if not self._is_over:
                self._bury_timer = self._around.later(_RETRY_SECONDS, self._bury_again)
            if not isinstance(failure, BrokerError):
                raise
        finally:
            self._burying = None

    def _bury_again(self) -> None:
        self._bury_timer = None
        self._bury()

    async def _bury_some(self, dead: Sequence[Entry]) -> None:
        letters: list[DeadLetter] = []
        for partition in sorted({entry.lane.partition for entry in dead}):
            mine = [entry for entry in dead if entry.lane.partition == partition]
            rows = await self._bodies(self.lanes[partition], mine)
            letters += (_letter(entry, rows[entry.offset]) for entry in mine if entry.offset in rows)
        if letters:
            await self._around.dead_letters.append(self.topic, letters)
        del self._dead[: len(dead)]
        for entry in dead:
            if entry.state is State.DEAD:
                self.settle(entry)

    # Committing

    def _progressed(self) -> None:
        self._commit_within(self._around.commit_ms / 1000)

    def _commit_within(self, seconds: float) -> None:
        if self._commit_timer is None and not self._is_over:
            self._commit_timer = self._around.later(seconds, self._commit_in_background)

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
        """Everything settled so far is committed when it returns."""
        async with self._commit_lock:
            floors = {(self.topic, lane.partition): lane.floor for lane in self.lanes.values() if lane.floor != lane.committed}
            if not floors or self._is_over:
                return
            groups = self._around.groups
            await groups.put(groups.commits(self.group, floors))
            for (_, partition), floor in floors.items():
                self.lanes[partition].committed = floor


def _letter(entry: Entry, row: Row) -> DeadLetter:
    return DeadLetter(row, entry.lane.partition, entry.attempt, entry.reason, entry.first_failure, entry.last_failure)
