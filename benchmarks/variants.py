"""Cost of a feature when publishing, as a ratio of two variants: `python -m benchmarks.variants --protocol flymq --schema json`.

Variants alternate, and each ratio is taken within one turn, so that other work on the machine affects both.

Enforced access: the user `bench` may publish, read and create by its roles and rules. 200 rules about other users make the rule set
realistic. Protocols with a login log in as `bench`; for the others it is the listener's principal.

Transactions: each record names its transaction, so its records can be sent only after the reply to BEGIN. Therefore a connection has
several transactions in flight: the reply to a BEGIN triggers the records of that transaction, its COMMIT, and the next BEGIN. The records
are encoded before the clock starts, with a placeholder for the transaction id.
"""

from __future__ import annotations

import json
import secrets
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import click

from benchmarks import main
from headrace.bench import options, traffic
from headrace.bench.children import Address, BenchFailed, Broker, broker
from headrace.bench.load import Chunk, LoadConnection, Tick, connected, run, sample_values
from headrace.bench.options import Bench, Chosen, Measured
from headrace.bench.protocols import PROTOCOLS, ProtocolLoad
from headrace.bench.protocols.contract import ConsumePlan
from headrace.bench.protocols.flymq import FlyMqLoad, call, payload_bytes
from headrace.bench.report import Figure, NoteValue, Target, cpu_note
from headrace.wire.flymq import Opcode, decode_reply, encode_reply, encode_request
from headrace.wire.flymq.access_messages import AccessCall, Auth, AuthReply, UserCreate
from headrace.wire.flymq.advanced_messages import BrokerCall, TxnBegin, TxnBegun, TxnCommit, TxnProduceBatch
from headrace.wire.flymq.framing import HEADER_BYTES
from headrace.wire.flymq.messages import (
    AUTO,
    Failure,
    ProduceBatch,
    RecordMetadataBatch,
    ReplyFrame,
)
from headrace.wire.flymq.schema_messages import RegisterSchema, SchemaWord

_SCHEMA_NAME: Final = "bench"
_SCHEMA: Final = {
    "type": "object",
    "required": ["id", "name"],
    "properties": {
        "id": {"type": "integer", "minimum": 0},
        "name": {"type": "string", "maxLength": 40},
        "price": {"type": "number"},
        "note": {"type": "string"},
    },
    "additionalProperties": False,
}


class FlyMqJsonLoad(FlyMqLoad):
    """FlyMQ with JSON objects as values, to a topic with or without a required JSON Schema."""

    def __init__(self, *, required: bool) -> None:
        self._required = required

    def open_topic(self, sock: socket.socket, topic: str) -> None:
        super().open_topic(sock, topic)
        if self._required:
            call(sock, RegisterSchema(_SCHEMA_NAME, SchemaWord("json"), json.dumps(_SCHEMA).encode()))
            call(sock, BrokerCall("schema.require", json.dumps({"topic": topic, "name": _SCHEMA_NAME}).encode()))

    def publish(self, topic: str, values: Sequence[bytes], first: int) -> bytes:
        return encode_request(ProduceBatch(topic, [_object(first + index, len(value)) for index, value in enumerate(values)]))


def _object(number: int, size: int) -> bytes:
    start = b'{"id":%d,"name":"article %d","price":12.5,"note":"' % (number, number % 1_000)
    return start + b"x" * (size - len(start) - 2) + b'"}'


IN_FLIGHT: Final = 48
"""Transactions of one connection with records sent, and as many begun: together at most the limit of a connection."""
_BEGIN: Final = encode_request(TxnBegin())
_PLACEHOLDER: Final = "\x01"
"""Repeated to the length of an id. It occurs in no value and no length field."""


def transactions(topic: str, values: Sequence[bytes], records: int, size: int) -> ConsumePlan:
    """Plan to publish `records` records in transactions of `size`. The meter sends the records and counts committed ones."""
    meter = Committed(topic, values, records, size)
    return ConsumePlan(_BEGIN * min(IN_FLIGHT, meter.left), meter)


class Committed:
    """Counts the records of committed transactions. The replies to TXN_PRODUCE are skipped by their size, one transaction at a time."""

    def __init__(self, topic: str, values: Sequence[bytes], records: int, size: int) -> None:
        self.count = 0
        self.left = -(-records // size)
        """Transactions that have not been sent."""
        self._topic, self._values, self._size = topic, values, size
        self._last_size = records - (self.left - 1) * size
        self._begins = max(0, self.left - IN_FLIGHT)
        """BEGINs not sent yet."""
        self._sizes: list[int] = []
        """Sizes of the transactions in flight, in order."""
        self._templates: dict[tuple[int, int, int], bytes] = {}
        example = encode_reply(Opcode.TXN_PRODUCE, RecordMetadataBatch(topic, [0], [0], [0], [AUTO], [0]))
        self._metadata_bytes = len(example)
        self._skip = 0
        self._held = b""

    def feed(self, received: bytearray, size: int) -> bytes:
        answers, at = [], min(self._skip, size)
        self._skip -= at
        data = self._held + received[at:size]
        at, end = 0, len(data)
        while end - at >= HEADER_BYTES:
            head = data[at : at + HEADER_BYTES]
            frame_bytes = HEADER_BYTES + payload_bytes(head)
            if head[2] == Opcode.TXN_PRODUCE:
                if frame_bytes != self._metadata_bytes:
                    raise BenchFailed(f"flymq: TXN_PRODUCE reply: expected {self._metadata_bytes} bytes, got {frame_bytes}")
                block = self._metadata_bytes * self._sizes[0]
                self._skip, at = max(0, at + block - end), min(end, at + block)
                continue
            if end - at < frame_bytes:
                break
            answers.append(self._on_reply(head[2], data[at + HEADER_BYTES : at + frame_bytes]))
            at += frame_bytes
        self._held = data[at:]
        return b"".join(answers)

    def _on_reply(self, opcode: int, payload: bytes) -> bytes:
        if opcode == Opcode.TXN_COMMIT:
            self.count += self._sizes.pop(0)
            return b""
        reply = decode_reply(ReplyFrame(opcode, payload))
        if isinstance(reply, TxnBegun):
            return self._transaction(reply.transaction)
        raise BenchFailed(f"flymq: {reply.message}" if isinstance(reply, Failure) else f"flymq: unexpected reply to a transaction: {reply}")

    def _transaction(self, id: str) -> bytes:
        self.left -= 1
        size = self._size if self.left else self._last_size
        self._sizes.append(size)
        frames = self._frames(len(id), size).replace(_PLACEHOLDER.encode() * len(id), id.encode())
        if not self._begins:
            return frames
        self._begins -= 1
        return frames + _BEGIN

    def _frames(self, id_bytes: int, size: int) -> bytes:
        """Encode the records of a transaction whose id has `id_bytes` bytes, and its COMMIT."""
        turns = max(1, len(self._values) // size)
        variant = (id_bytes, size, self.left % turns)
        if variant not in self._templates:
            first, placeholder = variant[2] * size, _PLACEHOLDER * id_bytes
            picked = [self._values[index % len(self._values)] for index in range(first, first + size)]
            produce = TxnProduceBatch(placeholder, self._topic, picked)
            self._templates[variant] = encode_request(produce) + encode_request(TxnCommit(placeholder))
        return self._templates[variant]


USER: Final = "bench"
RULES: Final = 200
"""Rules about other users."""


class FlyMqUserLoad(FlyMqLoad):
    """FlyMQ with a login."""

    def __init__(self, password: str) -> None:
        self._password = password

    def handshake(self, sock: socket.socket, key: bytes) -> None:
        log_in(sock, USER, self._password)


@contextmanager
def enforced_broker(directory: Path, ack: str, profile: Path | None = None) -> Iterator[tuple[Broker, str]]:
    """Run the broker and yield it with the password of `bench`. `directory` must not exist yet."""
    directory.mkdir()
    admin, password = secrets.token_urlsafe(), secrets.token_urlsafe()
    file = directory / "admin-password"
    file.touch(mode=0o600)
    file.write_text(admin, "utf-8")
    environment = {
        "HEADRACE__ACCESS__MODE": "enforced",
        "HEADRACE__ACCESS__ADMIN_PASSWORD_FILE": str(file),
        "HEADRACE__FIGG__PRINCIPAL": USER,
        "HEADRACE__RUSTLOG__PRINCIPAL": USER,
    }
    with broker(directory, ack=ack, profile=profile, environment=environment, key_owner=USER) as running:
        _create_user_and_rules(running.address, admin, password)
        yield running, password


def load_of(protocol: str, password: str) -> ProtocolLoad:
    """Return the load of a protocol for the user `bench`."""
    return FlyMqUserLoad(password) if protocol == "flymq" else PROTOCOLS[protocol]


def log_in(sock: socket.socket, user: str, password: str) -> None:
    reply = call(sock, Auth(user, password))
    if not isinstance(reply, AuthReply) or not reply.success:
        raise BenchFailed(f"flymq: login as {user} failed")


def _create_user_and_rules(address: Address, admin: str, password: str) -> None:
    with connected(address) as (sock,):
        log_in(sock, "admin", admin)
        call(sock, UserCreate(USER, password, roles=["producer", "consumer"]))
        _rule(sock, f"user:{USER}", "topic", "bench-")
        for index in range(RULES):
            _rule(sock, f"user:other-{index}", "topic", f"other-{index}-")


def _rule(sock: socket.socket, subject: str, kind: str, prefix: str) -> None:
    body = {"subject": subject, "actions": ["create", "publish", "read"], "kind": kind, "match": "prefix", "name": prefix}
    call(sock, AccessCall("rule.add", json.dumps(body).encode()))


AGAINST_ONE_TARGET: Final = Target(at_least=0.7)
"""Many connections reach at least 70 % of the rate of one."""
SCHEMA_TARGET: Final = Target(at_least=0.5)
"""Checking every value costs at most half of the throughput."""
TRANSACTION_TARGET: Final = Target(at_least=0.7)
"""For transactions of `TRANSACTION_RECORDS` or more; smaller ones have no target."""
TRANSACTION_RECORDS: Final = 100
ACCESS_TARGET: Final = Target(at_least=0.95)
"""Access rules cost at most 5 % of the throughput."""


@dataclass(frozen=True, slots=True)
class Compared:
    """Variant that plain publishing is compared with."""

    against_one: bool = False
    schema: str | None = None
    transactions: int | None = None
    access: str | None = None

    def check(self, protocol: str, connections: int, server: str | None) -> None:
        """Raise `UsageError` for options that exclude each other."""
        if [self.against_one, bool(self.schema), bool(self.transactions), bool(self.access)].count(True) > 1:
            raise click.UsageError("use only one of --against-one, --schema, --transactions and --access")
        if self.against_one and connections == 1:
            raise click.UsageError("--against-one needs --connections above 1")
        if (self.schema or self.transactions) and protocol != "flymq":
            raise click.UsageError("--schema and --transactions are for --protocol flymq")
        if self.access and server is not None:
            raise click.UsageError("--access cannot be used with --server")


@dataclass(slots=True)
class Variant:
    """One variant of publishing the same records."""

    figure: Figure
    target: Measured
    plan: traffic.Traffic
    publish: Callable[[traffic.Traffic, traffic.BenchTopic, Tick | None], float] = traffic.publish
    cpu_seconds: float = 0.0
    is_cpu_shown: bool = True
    """False where connections log in: hashing a password costs more than publishing a hundred thousand records."""

    def once(self, bench: Bench, turn: int) -> None:
        topic, before = traffic.new_topic(self.plan), self.target.cpu_seconds()
        with bench.steps.step(f"{self.figure.name} {turn + 1}/{bench.repeat}", self.plan.records) as tick:
            self.figure.runs.append(self.plan.records / self.publish(self.plan, topic, tick))
        self.cpu_seconds += self.target.cpu_seconds() - before


def take_turns(bench: Bench, variants: Sequence[Variant]) -> None:
    """Run all variants `repeat` times, in alternating order, because writeback of one variant overlaps the next."""
    for turn in range(bench.repeat):
        for variant in variants if turn % 2 == 0 else reversed(variants):
            variant.once(bench, turn)
    for variant in (variant for variant in variants if variant.is_cpu_shown):
        variant.figure.notes = cpu_note(variant.cpu_seconds, variant.plan.records * bench.repeat)


def ratio(name: str, above: Variant, below: Variant, target: Target | None) -> Figure:
    ratios = [one / other for one, other in zip(above.figure.runs, below.figure.runs, strict=True)]
    return Figure(name, "×", ratios, target)


def in_transactions(size: int) -> Callable[[traffic.Traffic, traffic.BenchTopic, Tick | None], float]:
    """Return a function that publishes in transactions of `size` records (FlyMQ)."""

    def publish(plan: traffic.Traffic, topic: traffic.BenchTopic, tick: Tick | None = None) -> float:
        values, counts = sample_values(plan.value_bytes), traffic.records_per_connection(plan.records, plan.connections)
        with traffic.logged_in(plan, len(counts)) as socks:
            loads = []
            for sock, count in zip(socks, counts, strict=True):
                begun = transactions(topic.name, values, count, size)
                loads.append(LoadConnection(sock, [Chunk(begun.request, 0)], begun.meter, count))
            return run(loads, tick)

    return publish


def variants_of(
    bench: Bench, brokers: ExitStack, chosen: Chosen, target: Measured, plan: traffic.Traffic, compared: Compared
) -> list[Variant]:
    """Return plain publishing and the variant that `compared` names. Further brokers are stopped by `brokers`."""
    name = f"{plan.load.name} publish, {chosen.ack}"
    plain = Variant(Figure(f"{name}, {plan.connections} connections" if plan.connections > 1 else name, "records/s", []), target, plan)

    def other(words: str, changed: traffic.Traffic, on: Measured = target) -> Variant:
        return Variant(Figure(f"{name}, {words}", "records/s", []), on, changed)

    if compared.against_one:
        return [plain, other("1 connection", replace(plan, connections=1))]
    if compared.schema:
        plain.plan = replace(plan, load=FlyMqJsonLoad(required=False))
        return [plain, other(f"{compared.schema} schema", replace(plan, load=FlyMqJsonLoad(required=True)))]
    if compared.transactions:
        staged = other(f"transactions of {compared.transactions}", plan)
        staged.publish = in_transactions(compared.transactions)
        window = IN_FLIGHT * compared.transactions
        return [plain, staged, other(f"{window:,} in flight", replace(plan, window=window))]
    if compared.access:
        running, password = brokers.enter_context(enforced_broker(bench.directory / compared.access, chosen.ack))
        enforced = replace(plan, load=load_of(plan.load.name, password), address=running.address, key=running.key)
        traffic.warm_up(enforced)
        checked = other(f"access {compared.access}", enforced, Measured(running.address, running.key, running))
        checked.is_cpu_shown = plan.load.name != "flymq"
        return [plain, checked]
    return [plain]


def figures_of(variants: Sequence[Variant], plan: traffic.Traffic, compared: Compared) -> list[Figure]:
    """Return the rate of each variant, and the ratios."""
    plain, protocol = variants[0], plan.load.name
    figures = [variant.figure for variant in variants]
    if compared.schema:
        figures.append(ratio(f"{protocol} publish: with a schema ÷ without", variants[1], plain, SCHEMA_TARGET))
    if compared.against_one:
        figures.append(ratio(f"{protocol} publish: {plan.connections} connections ÷ 1", plain, variants[1], AGAINST_ONE_TARGET))
    if compared.transactions:
        target = TRANSACTION_TARGET if compared.transactions >= TRANSACTION_RECORDS else None
        figures.append(ratio(f"{protocol} publish: transactions of {compared.transactions} ÷ none", variants[1], plain, target))
        figures.append(
            ratio(f"{protocol} publish: transactions of {compared.transactions} ÷ none, as many in flight", variants[1], variants[2], None)
        )
    if compared.access:
        figures.append(ratio(f"{protocol} publish: access {compared.access} ÷ open", variants[1], plain, ACCESS_TARGET))
    return figures


@click.command()
@options.protocol(sorted(PROTOCOLS))
@options.records(1_000_000)
@options.connections()
@click.option(
    "--window", type=click.IntRange(0), default=0, show_default=True, help="Unacknowledged records per connection; 0: limited by TCP only."
)
@click.option("--against-one", is_flag=True, help="Compare with a single connection that publishes as many records.")
@click.option("--schema", type=click.Choice(["json"]), help="Compare with a topic that requires a schema (FlyMQ).")
@click.option("--transactions", "size", type=click.IntRange(1, 10_000), help="Compare with transactions of this many records (FlyMQ).")
@click.option("--access", type=click.Choice(["enforced"]), help="Compare with a broker that enforces access rules.")
def variants(
    protocol_name: str, value_bytes: int, ack: str, server: str | None, key: str | None, profile: Path | None,
    repeat: int, output: str, parent: Path | None, records: int, connections: int, window: int, against_one: bool,
    schema: str | None, size: int | None, access: str | None,
) -> None:  # fmt: skip
    """Publish plainly and in one other way, by turns, and show the ratio."""
    config: dict[str, NoteValue] = {"protocol": protocol_name, "records": records, "value_bytes": value_bytes, "ack": ack}
    config |= {"connections": connections, "window": window}
    chosen = Chosen(ack, server, key, profile)
    compared = Compared(against_one, schema, size, access)
    compared.check(protocol_name, connections, server)
    with options.measuring("variants", repeat, output, parent, config) as running, ExitStack() as brokers:
        target = brokers.enter_context(running.broker(chosen))
        plan = traffic.Traffic(PROTOCOLS[protocol_name], target.address, target.key, records, value_bytes, connections, window)
        traffic.warm_up(plan)
        compared_variants = variants_of(running, brokers, chosen, target, plan, compared)
        take_turns(running, compared_variants)
        for figure in figures_of(compared_variants, plan, compared):
            running.report.add(figure)


if __name__ == "__main__":
    main(variants, "variants")
