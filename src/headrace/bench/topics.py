"""`headrace bench topics`: FlyMQ requests that are pipelined on one connection, beside single records to one topic.

Each kind of request has a broker of its own: one that maintains ten thousand topics would slow down what comes next. Each repetition
measures PRODUCE to one topic first, and each ratio is taken within one repetition. All names of topics have the same length, so that all
replies to one kind of request have the same size and are counted by their bytes.
"""

from __future__ import annotations

import secrets
import socket
import struct
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from itertools import cycle, islice
from statistics import fmean, median
from typing import Final, TypeAlias

from headrace.bench.children import Address, BenchFailed
from headrace.bench.load import CHUNK_BYTES, Chunk, LoadConnection, connected, run, sample_values
from headrace.bench.options import Bench, Chosen, Measured
from headrace.bench.protocols.contract import receive_exactly
from headrace.bench.protocols.flymq import call, payload_bytes
from headrace.bench.protocols.meters import Acks
from headrace.bench.report import Figure, Target, cpu_note
from headrace.limits import DELAYED_MAX
from headrace.wire.flymq import Opcode, decode_reply, encode_request
from headrace.wire.flymq.advanced_messages import ProduceDelayed, ProduceWithTtl, TxnBegin, TxnCommit, TxnProduceBatch
from headrace.wire.flymq.framing import HEADER_BYTES
from headrace.wire.flymq.messages import Commit, CreateTopic, ProduceBatch, ReplyFrame, Request

STAGED_TARGET: Final = Target(at_least=0.3)
"""Of PRODUCE to one topic: many topics in turn, COMMIT, PRODUCE_DELAYED and PRODUCE_WITH_TTL."""
TRANSACTION_TARGETS: Final = {100: Target(at_least=0.7), 1: Target(at_least=0.2)}
"""By records of a transaction."""
_DELAY_MS: Final = 3_600_000
_GROUP: Final = "bench"
_OPEN: Final = 240
"""Transactions that are begun together. Up to four groups are open; a connection may have 1,000."""
_REPLY: Final = struct.Struct(">2xBxIH")
"""Opcode, payload size, and length of the id."""


Plan: TypeAlias = "list[bytes] | TransactionMeter"
"""Requests with replies of one size, or transactions."""
Names: TypeAlias = Callable[[int], list[str]]
"""Returns the names of so many existing topics."""


@dataclass(slots=True)
class Workload:
    """One kind of request, and its rate in each repetition."""

    name: str
    target: Target | None
    prepare: Callable[[list[str]], Plan]
    """Build all requests for the given topics."""
    topics: int = 1
    rates: list[float] = field(default_factory=list)
    base_rates: list[float] = field(default_factory=list)
    """Of PRODUCE to one topic, in the same repetitions."""
    cpu_seconds: list[float] = field(default_factory=list)
    """Of the broker, per record."""
    base_cpu_seconds: list[float] = field(default_factory=list)


def workloads(records: int, value_bytes: int, topics: Sequence[int], repeat: int) -> list[Workload]:
    """Return PRODUCE to one topic, then what is compared with it."""
    values = list(islice(cycle(sample_values(value_bytes)), records))

    def single(build: Callable[[str, int, bytes], Request], count: int = records) -> Callable[[list[str]], Plan]:
        def prepare(names: list[str]) -> Plan:
            (topic,) = names
            return [encode_request(build(topic, index, value)) for index, value in enumerate(values[:count])]

        return prepare

    def produce(names: list[str]) -> Plan:
        turns = zip(cycle(names), values, strict=False)
        return [encode_request(ProduceBatch(topic, [value])) for topic, value in turns]

    def transactions(count: int) -> Callable[[list[str]], Plan]:
        def prepare(names: list[str]) -> Plan:
            (topic,) = names
            return TransactionMeter(topic, [values[first : first + count] for first in range(0, records, count)])

        return prepare

    delayed = min(records, DELAYED_MAX // repeat)
    return [
        Workload("PRODUCE to one topic", None, produce),
        *(Workload(f"PRODUCE to {count:,} topics in turn", STAGED_TARGET, produce, count) for count in topics),
        Workload("COMMIT", STAGED_TARGET, single(lambda topic, index, _: Commit(topic, _GROUP, 0, index))),
        Workload("PRODUCE_DELAYED", STAGED_TARGET, single(lambda topic, _, value: ProduceDelayed(topic, value, _DELAY_MS), delayed)),
        Workload("PRODUCE_WITH_TTL", STAGED_TARGET, single(lambda topic, _, value: ProduceWithTtl(topic, value, _DELAY_MS))),
        *(Workload(f"transactions of {count}", target, transactions(count)) for count, target in TRANSACTION_TARGETS.items()),
    ]


def measure(bench: Bench, chosen: Chosen, records: int, value_bytes: int, topics: Sequence[int], only: str) -> list[Figure]:
    """Measure all workloads whose name contains `only`, `repeat` times."""
    base, *others = workloads(records, value_bytes, topics, bench.repeat)
    found = [workload for workload in others if only in workload.name]
    if not found:
        raise BenchFailed(f"no request has {only!r} in its name: {', '.join(one.name for one in others)}")
    for workload in found:
        with bench.broker(chosen) as target:
            names = _topics(target.address)
            _run(target, base, names)
            for turn in range(bench.repeat):
                with bench.steps.step(f"{workload.name} {turn + 1}/{bench.repeat}", 2 * records):
                    for one, rates, cpu_seconds in (
                        (base, workload.base_rates, workload.base_cpu_seconds),
                        (workload, workload.rates, workload.cpu_seconds),
                    ):
                        rate, cpu = _run(target, one, names)
                        rates.append(rate)
                        cpu_seconds.append(cpu)
    return _figures(base.name, found)


def _run(target: Measured, workload: Workload, names: Names) -> tuple[float, float]:
    """Return the records per second, and the seconds of the broker's CPU per record."""
    plan = workload.prepare(names(workload.topics))
    # The broker closes a connection that sends nothing, so the requests are built before.
    with connected(target.address) as (sock,):
        load = plan.load(sock) if isinstance(plan, TransactionMeter) else _load(sock, plan)
        before = target.cpu_seconds()
        seconds = run([load])
        return load.records / seconds, (target.cpu_seconds() - before) / load.records


def _topics(address: Address) -> Names:
    """Return a function that returns the names of so many topics, and creates those that do not exist yet."""
    known: list[str] = []
    prefix = f"bench-{secrets.token_hex(4)}"

    def names(count: int) -> list[str]:
        with connected(address) as (sock,):
            while len(known) < count:
                known.append(f"{prefix}-{len(known):05d}")
                call(sock, CreateTopic(known[-1], 1))
        return known[:count]

    return names


def _figures(base: str, found: Sequence[Workload]) -> list[Figure]:
    figures = [_rate(base, [rate for one in found for rate in one.base_rates], [cpu for one in found for cpu in one.base_cpu_seconds])]
    figures += [_rate(one.name, one.rates, one.cpu_seconds) for one in found]
    for one in found:
        ratios = [mine / plain for mine, plain in zip(one.rates, one.base_rates, strict=True)]
        cpu = median(one.base_cpu_seconds) / max(median(one.cpu_seconds), 1e-9)
        figures.append(Figure(f"{one.name} ÷ {base}", "×", ratios, one.target, {"by broker CPU": round(cpu, 3)}))
    return figures


def _rate(name: str, rates: list[float], cpu_seconds: list[float]) -> Figure:
    return Figure(name, "records/s", rates, notes=cpu_note(fmean(cpu_seconds), 1))


def _load(sock: socket.socket, requests: list[bytes]) -> LoadConnection:
    """Send the first request to learn the size of a reply, and join the others."""
    sock.sendall(requests[0])
    head = receive_exactly(sock, HEADER_BYTES)
    size = HEADER_BYTES + len(receive_exactly(sock, payload_bytes(head)))

    def counted(frame: bytes, number: int) -> int:
        if frame[:HEADER_BYTES] != head:
            raise BenchFailed(f"flymq: expected a reply that starts with {head.hex()}, got {frame!r}")
        return number + 2

    each = max(1, CHUNK_BYTES // len(requests[0]))
    chunks = [Chunk(b"".join(requests[first : first + each]), each) for first in range(1, len(requests), each)]
    return LoadConnection(sock, chunks, Acks(size, counted), len(requests))


class TransactionMeter:
    """Begins transactions in groups, publishes and commits the records of each, and counts the records of committed transactions.

    The next group is begun before the requests of this one, so that the broker always has requests.
    """

    def __init__(self, topic: str, transactions: Iterable[Sequence[bytes]]) -> None:
        self.count = 0
        self.begins = encode_request(TxnBegin()) * _OPEN
        self._topic = topic
        self._waiting = deque(list(values) for values in transactions)
        """Records of each transaction that has no id yet."""
        self._is_single = all(len(values) == 1 for values in self._waiting)
        self._held = bytearray()
        self._skipped = 0
        """Bytes of the next read that belong to replies without interest."""
        self._begun = 0
        self._records: deque[int] = deque()
        """Of each transaction whose commit is not answered, in order."""

    def load(self, sock: socket.socket) -> LoadConnection:
        return LoadConnection(sock, [Chunk(self.begins * 2, 0)], self, sum(map(len, self._waiting)))

    def feed(self, received: bytearray, size: int) -> bytes:
        self._held += memoryview(received)[:size]
        held, at, begins, requests = bytes(self._held), self._skipped, list[bytes](), list[bytes]()
        size, unpack = len(held), _REPLY.unpack_from
        while size - at >= _REPLY.size:
            opcode, length, id_bytes = unpack(held, at)
            end = at + HEADER_BYTES + length
            if opcode == Opcode.TXN_PRODUCE:
                if self._is_single and (ahead := self._take_committed(held, at, end)):
                    at = ahead
                    continue
                # All replies to the records of one transaction have the same size.
                at += (end - at) * self._records[0]
                continue
            if end > size:
                break
            if opcode == Opcode.TXN_COMMIT:
                self.count += self._records.popleft()
                at = end
            elif opcode == Opcode.TXN_BEGIN:
                ids, at = self._take_begun(held, at, end - at, id_bytes)
                requests += self._start(ids)
                if self._begun % _OPEN == 0 and len(self._waiting) > _OPEN:
                    # Before the requests of this group: their replies do not wait for its commits.
                    begins.append(self.begins)
            else:
                raise BenchFailed(f"flymq: expected a reply to a transaction, got {decode_reply(ReplyFrame(opcode, held[at + 8 : end]))}")
        self._skipped = max(0, at - size)
        del self._held[:at]
        return b"".join((*begins, *requests))

    def _take_begun(self, held: bytes, at: int, frame_bytes: int, id_bytes: int) -> tuple[Sequence[bytes], int]:
        """Return the ids of this group of which there are replies, and the position after them. There is one at least."""
        front, count = held[at : at + _REPLY.size], min(_OPEN - self._begun % _OPEN, (len(held) - at) // frame_bytes)
        fields = _begun_layout(id_bytes, frame_bytes, count).unpack_from(held, at)
        count = _same(fields[0::2], front)  # fewer if the ids become longer
        self._begun += count
        return fields[1 : 2 * count : 2], at + count * frame_bytes

    def _take_committed(self, held: bytes, at: int, commit_at: int) -> int:
        """Count the transactions of one record whose replies are complete and have the same sizes. Return the position after them; 0 if
        there are none."""
        if len(held) - commit_at < HEADER_BYTES or held[commit_at + 2] != Opcode.TXN_COMMIT:
            return 0
        pair_bytes = commit_at - at + HEADER_BYTES + payload_bytes(held[commit_at : commit_at + HEADER_BYTES])
        count = min((len(held) - at) // pair_bytes, len(self._records))
        for first in (at, commit_at):
            for position in range(first, first + HEADER_BYTES):
                # The same byte of all headers. Few calls for many replies, so that the generator does not measure itself.
                count = _same(held[position : at + count * pair_bytes : pair_bytes], held[position])
        self.count += count
        for _ in range(count):
            self._records.popleft()
        return at + count * pair_bytes if count else 0

    def _start(self, ids: Sequence[bytes]) -> Iterable[bytes]:
        """Return the requests of the next transactions, which have just begun."""
        started = [self._waiting.popleft() for _ in range(min(len(ids), len(self._waiting)))]
        self._records += map(len, started)
        if not started:
            return []
        # All values have the same size, so nothing but ids and values differs.
        whole, (first, *_) = _requests(ids[0].decode(), self._topic, started[0][:1]), ids
        id_at, commit_at = whole.index(first), len(whole) - len(first) - HEADER_BYTES - 2
        front, commit = whole[:id_at], whole[commit_at : -len(first)]
        middle = whole[id_at + len(first) : commit_at - len(started[0][0])]
        if not self._is_single:
            heads = [front + id + middle for id in ids]
            return [part for id, head, values in zip(ids, heads, started, strict=False) for part in (head, head.join(values), commit, id)]
        parts = [b""] * (6 * len(started))
        parts[0::6] = [front] * len(started)
        parts[1::6] = parts[5::6] = ids[: len(started)]
        parts[2::6] = [middle] * len(started)
        parts[3::6] = [value for (value,) in started]
        parts[4::6] = [commit] * len(started)
        return parts


@lru_cache(maxsize=512)
def _begun_layout(id_bytes: int, frame_bytes: int, count: int) -> struct.Struct:
    """All up to the id, and the id, of so many replies to TXN_BEGIN."""
    return struct.Struct(f"{_REPLY.size}s{id_bytes}s{frame_bytes - _REPLY.size - id_bytes}x" * count)


def _same(found: bytes | Sequence[object], expected: object) -> int:
    """Return how many items at the front are as expected."""
    items: Sequence[object] = found
    return len(items) if items.count(expected) == len(items) else next(index for index, one in enumerate(items) if one != expected)


def _requests(id: str, topic: str, values: Sequence[bytes]) -> bytes:
    return encode_request(TxnProduceBatch(id, topic, list(values))) + encode_request(TxnCommit(id))
