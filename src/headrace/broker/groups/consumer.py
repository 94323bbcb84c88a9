"""Delivery state of one group and topic, common to all its members.

Members take records, settle them, and lose them when they leave. The members of a *shared* group take from the same `PartitionProgress`
objects. In an *ordered* group every partition has one owner: when members come and go, partitions move between them, and a new owner
begins when its predecessor has settled what it holds, or after `HANDOVER_MS`. A member that does not settle in time, or does not ask for
the records that wait in its partitions, is *stalled*: its partitions belong to the others until it settles or asks again.

`GroupConsumer` watches the partitions and redelivers overdue records. `background.py` moves records without attempts left to the dead
letters, and commits the group's progress. The committed offset is the truth: when anyone else commits another one, the group continues
there.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from typing import Final, Literal

from headrace.broker.groups.background import DeadLetterMoves, GroupContext, ProgressCommits
from headrace.broker.groups.deliveries import Deliveries, consecutive
from headrace.broker.groups.membership import PATIENCE_MS, Mode, assign
from headrace.broker.groups.progress import AdjacentBatches, Entry, MemberState, PartitionProgress, Row, State, rows_of
from headrace.broker.groups.taking import Taking
from headrace.broker.health import supervise
from headrace.broker.reading.batches import STEP_RECORDS_MAX, unexpired
from headrace.broker.reading.waits import Wait
from headrace.broker.settings import Timer
from headrace.engine.contract import Batch
from headrace.errors import BrokerError, OffsetOutOfRange

HANDOVER_MS: Final = 500
"""Time that the former owner of a partition has to settle what it holds. Then it is delivered again, to the new owner."""
SILENCE_MS: Final = 30_000
"""Time after which an owner that does not ask for records loses its partitions."""
_BUFFER_BYTES: Final = 256 * 1024
_REREAD_BYTES: Final = 64 * 1024
"""A redelivery reads a little more than one record, because adjacent records are often redelivered together."""


class GroupConsumer:
    """Consumes a topic on behalf of a group. `idle` is called when the last member has left, `over` when the consumer has ended."""

    def __init__(
        self, context: GroupContext, group: str, topic: str, *, idle: Callable[[GroupConsumer], None], over: Callable[[GroupConsumer], None]
    ) -> None:
        self.group, self.topic = group, topic
        self.mode: Mode = "ordered"
        self.partitions: dict[int, PartitionProgress] = {}
        self.members: list[MemberState] = []
        self.waits: dict[MemberState, Wait] = {}
        """Members that wait for records. One that has just taken some goes to the end, so that arrivals go round."""
        self.wakes = 0
        """Number of events after which there may be records to take."""
        self.rules = 0
        """Number of changes of the access rules."""
        self.error: BrokerError | None = None
        self.is_draining = False
        self.takes_all = False
        """Whether a member takes from all partitions, including those added later."""
        self._is_over = False
        self._context = context
        self._idle, self._over = idle, over
        self._deliveries = Deliveries()
        self._locks: dict[int, asyncio.Lock] = {}
        self._unwatch: list[Callable[[], None]] = []
        self._timer: Timer | None = None
        self._timer_at = 0
        self._commits = ProgressCommits(context, group, topic, self.partitions, self._spawn)
        self._dead = DeadLetterMoves(context, topic, self._bodies, self.settle, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def is_needed(self) -> bool:
        """Whether it knows something that a successor would not find in the committed offsets."""
        return self._deliveries.count > 0 or any(progress.floor != progress.committed for progress in self.partitions.values())

    @property
    def unsettled(self) -> int:
        """Deliveries that wait for an ack, or for the next attempt."""
        return self._deliveries.count

    # Members

    def add_partition(self, partition: int, position: int) -> None:
        self.partitions[partition] = PartitionProgress(
            partition, position, self._context.groups.committed(self.group, self.topic, partition)
        )
        self._locks[partition] = asyncio.Lock()
        self._unwatch.append(self._context.engine.watch(self.topic, partition, self._grown))
        # Commit the first position too: a consumer that stops before its first ack must resume at the same place.
        self._commits.soon()
        self.rebalance()

    def join(self, member: MemberState) -> None:
        self.members.append(member)
        self._deliveries.count_max += member.policy.unsettled_max
        self._count_members()
        self.rebalance()

    def leave(self, member: MemberState) -> asyncio.Future[None]:
        """Requeue what the member has in flight. Resolves when the progress is committed or the commit has failed."""
        self.members.remove(member)
        self._deliveries.count_max -= member.policy.unsettled_max
        self._count_members()
        now = self._context.clock()
        for entry in list(member.in_flight.values()):
            if member.policy.dead_letters and not self.is_draining:
                self._failed(entry, 0, "consumer left")
            else:
                self._requeue(entry, now)
        self._deliveries.release(member)
        self.rebalance()
        return self._spawn(self._finish())

    def _count_members(self) -> None:
        for member in self.members:
            member.is_alone = len(self.members) == 1

    async def _finish(self) -> None:
        await self._dead.finish()
        try:
            await self.commit()
        except BrokerError:
            self._commits.retry()
        if not self.members and not self._is_over:
            self._idle(self)

    def stop(self) -> None:
        """End without members: nothing is in use any more."""
        if not self._is_over:
            self._stop()
            self._over(self)

    def fail(self, error: BrokerError) -> None:
        """End all waits with the error and stop committing: the topic or the group is deleted."""
        self.error = error
        self.wakes += 1
        for wait in self.waits.values():
            wait.end(error)
        self.stop()

    async def drain(self) -> None:
        """Deliver nothing more, finish the moves to the dead letters, commit."""
        self.is_draining = True
        for wait in self.waits.values():
            wait.end()
        await self._finish()
        self._stop()

    def _stop(self) -> None:
        """Cancel all timers and commits: a successor may already own the group."""
        self._is_over = True
        for stop in self._unwatch:
            stop()
        self._unwatch.clear()
        self._commits.stop()
        self._dead.stop()
        if self._timer is not None:
            self._timer.cancel()

    def wake(self) -> None:
        """Wake the waiting members: there may be records to take."""
        self.wakes += 1
        for wait in self.waits.values():
            wait.wake()

    def recheck(self) -> None:
        """Let each member check its permission again: the rules changed."""
        self.rules += 1
        self.wake()

    def _wake(self, member: MemberState | None) -> None:
        self.wakes += 1
        if member is not None and (wait := self.waits.get(member)) is not None:
            wait.wake()

    def _spawn(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Keep a reference to the task: the loop has only weak ones."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        supervise(self._context.engine.health, "settlement", task)
        return task

    # Ownership

    def rebalance(self) -> None:
        """Assign the partitions of an ordered group to its members, and wake those that wait."""
        if self.mode == "ordered":
            able = [member for member in self.members if not member.stalled] or self.members
            now = self._context.clock()
            current = {partition: progress.owner for partition, progress in self.partitions.items() if progress.owner is not None}
            owners = assign(self.partitions, able, current)
            for partition, progress in self.partitions.items():
                if progress.owner is not (owner := owners.get(partition)):
                    progress.owner, progress.handover_until = owner, None
                    if progress.held_by_others(owner):
                        progress.handover_until = now + HANDOVER_MS
                        self._set_timer(progress.handover_until)
            self._watch_owners()
        self.wake()

    def owned(self, member: MemberState) -> list[int]:
        """Return the partitions that the member takes from."""
        if self.mode == "ordered":
            return [partition for partition, progress in self.partitions.items() if progress.owner is member]
        return [partition for partition in self.partitions if member.accepts(partition)]

    def _may_take(self, member: MemberState, progress: PartitionProgress) -> bool:
        if self.mode == "shared":
            return True
        if progress.owner is not member:
            return False
        if progress.handover_until is not None:
            held, now = progress.held_by_others(member), self._context.clock()
            if held and now < progress.handover_until:
                return False
            progress.handover_until = None
            for entry in held:
                self._requeue(entry, now, counts=False)
        return True

    def seen(self, member: MemberState, now: int, *, has_settled: bool) -> None:
        """Note that the member is alive. A stalled one gets partitions again."""
        member.seen_at = now
        if member.stalled and (has_settled or member.stalled == "silence"):
            member.stalled = ""
            self.rebalance()

    def _stalls(self, member: MemberState) -> bool:
        """Return whether the member does not ask for records that wait in its partitions. One that holds records may be working on them."""
        if member in self.waits or member.unsettled or member.seen_at + SILENCE_MS > self._context.clock():
            return False
        return any(progress.owner is member and self._has_new(progress) for progress in self.partitions.values())

    def _has_new(self, progress: PartitionProgress) -> bool:
        if progress.buffered or progress.next_due() is not None:
            return True
        return progress.position < self._context.engine.bounds(self.topic, progress.partition).end

    def _stall(self, members: Iterable[MemberState], why: Literal["acks", "silence"]) -> None:
        for member in members:
            member.stalled = member.stalled or why
        self.rebalance()

    def _grown(self) -> None:
        self.wake()
        self._watch_owners()

    def _watch_owners(self) -> None:
        """Set the timer that notices owners that ask for nothing. A single member keeps its partitions."""
        if self.mode == "ordered" and len(self.members) > 1:
            owners = {progress.owner for progress in self.partitions.values()}
            silent = [owner.seen_at for owner in owners if owner is not None and owner not in self.waits]
            if silent:
                self._set_timer(max(min(silent) + SILENCE_MS, self._context.clock() + 1_000))

    # Taking

    async def take(self, taking: Taking, partitions: Sequence[PartitionProgress]) -> None:
        """Take what is ready. In each partition redeliveries come first, then new records."""
        try:
            for progress in partitions:
                if taking.is_full:
                    break
                lock = self._locks[progress.partition]
                if progress.buffered and not lock.locked() and self.mode == "shared" and progress.next_due() is None:
                    self._take_buffered(taking, progress)  # in memory: no other member can come in between
                    if progress.buffered or taking.is_full:
                        continue
                async with lock:
                    if self._may_take(taking.member, progress):
                        await self._take_again(taking, progress)
                        await self._take_new(taking, progress)
        except (asyncio.CancelledError, BrokerError):
            # The caller was cancelled and never sees these deliveries, so they do not count as attempts.
            for entry in taking.entries():
                if entry.state is State.IN_FLIGHT:
                    self._requeue(entry, self._context.clock(), counts=False)
            self.wake()
            raise
        if not taking.is_empty:
            self._set_ack_timer(taking.member, self._context.clock())

    def take_now(self, member: MemberState, records_max: int, bytes_max: int, now: int) -> tuple[int, Batch] | None:
        """Take so many records that are in memory, as one range of a member whose policy has ranges, and return its first id. None:
        nothing is taken, and `take` finds what there is."""
        if self.mode != "shared" or len(self.partitions) != 1:
            return None
        for partition, progress in self.partitions.items():
            if not member.accepts(partition) or self._locks[partition].locked() or progress.next_due() is not None:
                return None
            if not progress.buffered or records_max > member.room or self._deliveries.room <= 0:
                return None
            first = progress.buffered[0]
            if records_max > len(first) or first.expires or first.has_headers:
                return None
            batch = first if records_max == len(first) else first.window(0, records_max)
            if records_max > 1 and batch.size_bytes > bytes_max:
                return None
            progress.drop_buffered(records_max)
            if records_max == 1:
                entry = self._deliveries.add(progress, batch.first_offset, None, member, now)
            else:
                entry = self._deliveries.add_range(progress, batch, member, now)
            self._set_ack_timer(member, now)
            return entry.id, batch
        return None

    def _set_ack_timer(self, member: MemberState, now: int) -> None:
        wait_ms = member.policy.ack_timeout_ms
        self._set_timer(now + (wait_ms if member.full_since is None else min(wait_ms, PATIENCE_MS)))

    async def _take_again(self, taking: Taking, progress: PartitionProgress) -> None:
        pop = progress.pop_due_in_order if self.mode == "ordered" else progress.pop_due
        due = pop(self._context.clock(), taking.records_left)
        if not due:
            return
        try:
            rows = await self._bodies(progress.partition, due)
            now = self._context.clock()
            if not self._may_take(taking.member, progress):
                return  # the partition has moved to another member meanwhile
            for entry in due:
                if entry.state is not State.WAITING:
                    continue  # acked late, while its body was read
                row = rows.get(entry.offset)
                if row is None or row.is_expired(now):
                    self.settle(entry)
                elif not taking.fits(row):
                    break
                else:
                    progress.deliver(entry, taking.member, now)
                    taking.add(entry, row)
        finally:
            for entry in due:
                if entry.state is State.WAITING:
                    progress.requeue(entry)
        if (time := progress.next_due()) is not None and time > now:
            self._set_timer(time)

    async def _take_new(self, taking: Taking, progress: PartitionProgress) -> None:
        """Take until the caller has enough: the buffer may end before that. In an ordered group redeliveries hold back new records."""
        while not taking.is_full and not (self.mode == "ordered" and progress.next_due() is not None):
            if not progress.buffered:
                await self._fill_buffer(progress)
            if not progress.buffered or not self._may_take(taking.member, progress):
                return
            self._take_buffered(taking, progress)
            if progress.buffered:
                return

    def _take_buffered(self, taking: Taking, progress: PartitionProgress) -> None:
        now, member = self._context.clock(), taking.member
        room = self._deliveries.room
        if member.policy.chunks:
            if room > 0:
                self._take_chunk(taking, progress, now)
            return
        while progress.buffered and room > 0 and (fitting := min(taking.fitting(progress.buffered[0]), room)) > 0:
            is_range = member.policy.ranges and not progress.buffered[0].expires and not progress.buffered[0].has_headers
            if member.policy.ranges and not is_range and taking.chunks:
                return  # single records are handed out before ranges, and these come after one
            batch = progress.pop_buffered(fitting)
            if is_range:
                taking.count(batch)
                taking.chunks.append((self._deliveries.add_range(progress, batch, member, now), [batch]))
                room -= 1
                continue
            for row in rows_of(batch):
                if row.is_expired(now):
                    self._commits.soon()
                else:
                    taking.add(self._deliveries.add(progress, row.offset, None, member, now), row)
                    room -= 1

    def _take_chunk(self, taking: Taking, progress: PartitionProgress, now: int) -> None:
        """Take all batches that fit as one chunk: a topic filled one record at a time has as many batches as records."""
        batches: list[Batch] = []
        while progress.buffered and (fitting := taking.fitting(progress.buffered[0], is_first=taking.is_empty and not batches)) > 0:
            batch = progress.pop_buffered(fitting)
            taking.count(batch)
            batches.append(batch)
        if not batches:
            return
        living = unexpired(batches, now)
        if living:
            chunk = batches[0] if len(batches) == 1 else AdjacentBatches(batches)
            taking.chunks.append((self._deliveries.add(progress, chunk.first_offset, chunk, taking.member, now), living))
        else:
            self._commits.soon()

    async def _fill_buffer(self, progress: PartitionProgress) -> None:
        engine = self._context.engine
        while not progress.buffered and (position := progress.position) < (end := engine.bounds(self.topic, progress.partition).end):
            try:
                batches = await engine.read(self.topic, progress.partition, position, bytes_max=_BUFFER_BYTES, records_max=STEP_RECORDS_MAX)
            except OffsetOutOfRange as error:
                # Retention deleted records that the group had not read. Continue at the first offset.
                batches, end = [], max(position + 1, error.first)
            if progress.position == position:  # else the group was moved meanwhile
                # An empty read below the end means that compaction removed these records.
                living = unexpired(batches, self._context.clock())
                progress.add_buffered(living, batches[-1].next_offset if batches else end)
            self._commits.soon()
            if not progress.buffered:
                await asyncio.sleep(0)  # there may be millions of expired records

    async def _bodies(self, partition: int, entries: Iterable[Entry]) -> dict[int, Row]:
        """Read the records of these entries again. Records removed by retention or compaction are missing."""
        rows: dict[int, Row] = {}
        for offset in sorted(entry.offset for entry in entries):
            if offset in rows:
                continue
            try:
                batches = await self._context.engine.read(self.topic, partition, offset, bytes_max=_REREAD_BYTES)
            except OffsetOutOfRange:
                continue
            for batch in batches:
                rows.update((row.offset, row) for row in rows_of(batch))
        return rows

    # Settling

    def held(self, member: MemberState, id: int) -> Entry | None:
        """Return the entry of a single record or a chunk if this member received it last. A range that has it becomes single records."""
        entry = self._deliveries.find(id)
        return None if entry is None or entry.holder is not member else self._deliveries.single(entry, id)

    def ack(self, member: MemberState, ids: Sequence[int]) -> list[bool]:
        """Settle these deliveries, ranges of them at once. False: unknown, or delivered to another member since."""
        if len(ids) == 1:
            single = self._deliveries.by_id.get(ids[0])
            if single is not None and single.chunk is None and single.holder is member:
                self.settle(single)
                return [True]
        known: list[bool] = []
        while (at := len(known)) < len(ids):
            entry = self._deliveries.find(ids[at])
            if entry is None or entry.holder is not member:
                known.append(False)
                continue
            count = 1
            if entry.is_range and entry.first_id == ids[at]:
                count = consecutive(ids, at, entry.count)
                if count < entry.count:
                    entry.progress.settle_front(entry, count)
                    self._has_settled(entry, was_short=False)
                else:
                    self.settle(entry)
            else:
                held = self.held(member, ids[at])
                assert held is not None
                self.settle(held)
            known += [True] * count
        return known

    def held_at(self, member: MemberState, partition: int, offset: int) -> Entry | None:
        """Return the entry of this record if this member received it last."""
        progress = self.partitions.get(partition)
        entry = None if progress is None else progress.unsettled.get(offset)
        return entry if entry is not None and entry.holder is member and entry.chunk is None else None

    def held_below(self, member: MemberState, partition: int, offset: int) -> list[Entry]:
        """Return the entries below the offset that this member received last."""
        progress = self.partitions.get(partition)
        entries = () if progress is None else progress.unsettled.values()
        return [entry for entry in entries if entry.holder is member and entry.next_offset <= offset]

    def settle(self, entry: Entry) -> None:
        was_short, holder = self._deliveries.room <= 0, entry.holder
        # A member with credit left does not wait for an ack.
        is_unneeded = entry.state is State.IN_FLIGHT and holder is not None and holder.room > 0
        self._forget(entry)
        self._has_settled(entry, was_short=was_short, wakes_holder=not is_unneeded)

    def _has_settled(self, entry: Entry, *, was_short: bool, wakes_holder: bool = True) -> None:
        member, progress = entry.holder, entry.progress
        self._commits.soon()
        if was_short:
            self.wake()
        else:
            if wakes_holder:
                self._wake(member)
            if progress.owner is not None and progress.owner is not member:
                self._wake(progress.owner)

    def _forget(self, entry: Entry) -> None:
        self._deliveries.remove(entry)
        entry.progress.settle(entry)

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

    def check_overdue(self, now: int) -> None:
        """Redeliver records whose ack is overdue. In an ordered group their member loses its partitions to the others."""
        late: list[MemberState] = []
        for member in self.members:
            while (entry := member.first_overdue()) is not None and entry.time <= now:
                self._failed(entry, 0, "timed out")
                late.append(member)
        if late and self.mode == "ordered" and len(self.members) > 1:
            self._stall(late, "acks")

    def _failed(self, entry: Entry, delay_ms: int, reason: str) -> None:
        assert entry.holder is not None
        policy, now = entry.holder.policy, self._context.clock()
        for part in self._deliveries.split(entry) if entry.is_range else [entry]:
            part.failed(now)
            if not policy.is_exhausted(part.attempt):
                self._requeue(part, now + delay_ms)
                self._set_timer(now + delay_ms)
            elif policy.dead_letters:
                self._give_up(part, reason)
            else:
                self.settle(part)
        self.wake()

    def _requeue(self, entry: Entry, until: int, *, counts: bool = True) -> None:
        """Deliver again. A chunk or a range becomes single records, which members of any kind can take."""
        for part in self._deliveries.split(entry):
            if not counts:
                part.attempt -= 1
            part.progress.wait(part, until)

    def _give_up(self, entry: Entry, reason: str) -> None:
        entry.progress.mark_dead(entry, reason)
        self._dead.add(entry)

    def moved(self, partition: int, offset: int) -> None:
        """Continue at an offset that was committed by another than this consumer: what is below it is settled, the rest is not."""
        progress = self.partitions.get(partition)
        if progress is None or offset == progress.committing or self._is_over:
            return
        progress.committed = offset
        bounds = self._context.engine.bounds(self.topic, partition)
        offset = min(max(offset, bounds.first), bounds.end)
        is_back = offset < progress.floor
        for entry in [entry for entry in progress.unsettled.values() if entry.is_range and entry.floor < offset < entry.next_offset]:
            self._deliveries.split(entry)
        for entry in list(progress.unsettled.values()):
            if is_back or entry.next_offset <= offset:
                self._forget(entry)
        if is_back:
            progress.rewind(offset)
        else:
            progress.skip_to(offset)
        self._commits.soon()
        self.wake()

    # One timer for the next time-out, redelivery or handover. It may fire for a record settled since; then it is set again.

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
        self.check_overdue(self._context.clock())
        if self.mode == "ordered" and len(self.members) > 1 and (silent := [member for member in self.members if self._stalls(member)]):
            self._stall(silent, "silence")
        now = self._context.clock()
        full = [member for member in self.members if member.full_since is not None and not member.policy.chunks]
        for member in full:
            if member.full_since is not None and member.full_since + PATIENCE_MS <= now:
                member.credit.stretch()
                member.full_since = None if member.room > 0 else now
                self._wake(member)
        times = [time for progress in self.partitions.values() if (time := progress.next_due()) is not None]
        times += [progress.handover_until for progress in self.partitions.values() if progress.handover_until is not None]
        if any(time <= now for time in times):
            self.wake()  # no timer for these: they wait for a consumer to take them
        times += (entry.time for member in self.members if (entry := member.first_overdue()) is not None)
        times += (member.full_since + PATIENCE_MS for member in full if member.full_since is not None)
        if (soonest := min((time for time in times if time > now), default=None)) is not None:
            self._set_timer(soonest)

    async def commit(self) -> None:
        """Commit everything settled so far."""
        await self._commits.commit()
