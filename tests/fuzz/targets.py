"""Fuzz targets: every decoder of external bytes, every schema language, and Arrow input.

A target takes any bytes and may raise the errors it documents. Everything else is a finding: another exception, a wrong
answer (an assertion here), a crash, too much time or too much memory. Seeds come from the encoders and from the samples of the
other tests, so the corpus never grows stale and nothing binary is committed.
"""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Final

import pyarrow as pa

from headrace.errors import BrokerError, CorruptData, InvalidRequest, InvalidSchema, WireError
from headrace.flight import request
from headrace.flight.writing import Splitter, Target, check_rows
from headrace.records import RecordBatch
from headrace.schemas import SchemaType, compile_schema
from headrace.schemas.shapes import reader_of
from headrace.storage.batch import StoredBatch
from headrace.storage.encoding import encode
from headrace.storage.manifest import Checkpointed, Manifest
from headrace.wire.blipmq import Decoder as BlipMqDecoder
from headrace.wire.blipmq import sniff as sniff_blipmq
from headrace.wire.figg import client_decoder, server_decoder
from headrace.wire.figg import sniff as sniff_figg
from headrace.wire.flymq import encode_reply, encode_request
from headrace.wire.flymq.framing import decode_failure
from headrace.wire.flymq.framing import sniff as sniff_flymq
from headrace.wire.fujin import ReplyDecoder, RequestDecoder
from headrace.wire.rustlog import ReplyDecoder as RustLogReplyDecoder
from headrace.wire.rustlog import RequestDecoder as RustLogRequestDecoder
from headrace.wire.rustlog import sniff as sniff_rustlog
from tests.wire.blipmq.golden import GOLDEN
from tests.wire.blipmq.reference import decode as decode_blipmq
from tests.wire.blipmq.reference import singles
from tests.wire.figg import streams
from tests.wire.flymq import access_samples, advanced_samples, samples, schema_samples
from tests.wire.fujin import samples as fujin_samples
from tests.wire.rustlog.vectors import REPLY_FRAMES, REQUEST_FRAMES

SEPARATOR: Final = b"\x00\xff\x00"
"""Between the definitions and the value of a schema target: no text of a schema holds it."""


@dataclass(frozen=True, slots=True)
class FuzzTarget:
    """A target. `run` takes any bytes; `seeds` are valid inputs."""

    run: Callable[[bytes], None]
    seeds: Callable[[], list[bytes]]


def _halves(data: bytes) -> list[bytes]:
    """The input without its first byte, which says where it is cut."""
    body = data[1:]
    at = data[0] * len(body) // 256 if data else 0
    return [body[:at], body[at:]]


def _with_cut(seeds: Iterator[bytes]) -> list[bytes]:
    return [b"\x80" + seed for seed in seeds]


# Wire decoders: two chunks decode to the same as the whole.


def _blipmq(data: bytes) -> None:
    sniff_blipmq(data)
    halves = _halves(data)
    assert list(singles(decode_blipmq(halves))) == list(singles(decode_blipmq([b"".join(halves)])))
    list(_until_refused(BlipMqDecoder(frame_bytes_max=4096), halves))


def _figg(data: bytes) -> None:
    sniff_figg(data)
    halves = _halves(data)
    for decoder in (server_decoder, client_decoder):
        assert streams.flat_messages(decoder(), halves) == streams.flat_messages(decoder(), [b"".join(halves)])


def _flymq(data: bytes) -> None:
    sniff_flymq(data)
    halves = _halves(data)
    assert samples.decoded(halves) == samples.decoded([b"".join(halves)])


def _flymq_replies(data: bytes) -> None:
    halves = _halves(data)
    assert samples.decoded_replies(halves) == samples.decoded_replies([b"".join(halves)])
    try:
        decode_failure(data)
    except WireError:
        pass


def _fujin(data: bytes) -> None:
    halves = _halves(data)
    for chunk in (halves, [b"".join(halves)]):
        list(_until_refused(RequestDecoder(), chunk))
        list(_until_refused(ReplyDecoder(), chunk))


def _rustlog(data: bytes) -> None:
    sniff_rustlog(data)
    halves = _halves(data)
    whole, cut = RustLogRequestDecoder(), RustLogRequestDecoder()
    assert whole.feed(b"".join(halves)) == [answer for half in halves for answer in cut.feed(half)]


def _rustlog_replies(data: bytes) -> None:
    list(_until_refused(RustLogReplyDecoder(), _halves(data)))


def _until_refused(decoder: object, chunks: list[bytes]) -> Iterator[object]:
    try:
        for chunk in chunks:
            yield from decoder.feed(chunk)  # type: ignore[attr-defined]  # every decoder has it
    except WireError:
        return


def _flymq_requests() -> list[bytes]:
    groups = (samples.REQUESTS, access_samples.REQUESTS, advanced_samples.REQUESTS, schema_samples.REQUESTS)
    return _with_cut(encode_request(requested) for group in groups for requested in group)


def _flymq_reply_seeds() -> list[bytes]:
    groups = (samples.REPLIES, access_samples.REPLIES, advanced_samples.REPLIES, schema_samples.REPLIES)
    return _with_cut(encode_reply(opcode, reply) for group in groups for opcode, reply in group)


# Schemas: definition, value, definition of another version.


def _schema(kind: SchemaType) -> Callable[[bytes], None]:
    def run(data: bytes) -> None:
        definition, value, other = (data.split(SEPARATOR, 2) + [b"", b""])[:3]
        try:
            schema = compile_schema(kind, definition)
        except InvalidSchema:
            return
        assert schema.accepts([value]) == (schema.faults(value) == []), "the fast answer and the explained one agree"
        schema.conflicts(schema)
        try:
            schema.conflicts(compile_schema(kind, other))
        except InvalidSchema:
            pass
        try:
            reader = reader_of(kind, definition)
        except InvalidSchema:
            return
        rows, faults = reader.read([value, None, value])
        assert len(rows) == 3 and set(faults) <= {0, 2}

    return run


_JSON: Final = (
    (b'{"type":"object","properties":{"a":{"type":"integer"}},"required":["a"]}', b'{"a":1}', b'{"type":"object"}'),
    (b'{"items":{"type":"string","pattern":"^a+$"},"maxItems":3}', b'["a","aa"]', b'{"type":"array"}'),
    (b'{"enum":["x","y",null,1.5]}', b'"x"', b'{"const":"x"}'),
    (b'{"$defs":{"n":{"type":["null","object"],"properties":{"n":{"$ref":"#/$defs/n"}}}},"$ref":"#/$defs/n"}', b'{"n":{"n":null}}', b"{}"),
    (b'{"anyOf":[{"type":"number","minimum":0},{"not":{"type":"number"}}],"if":true,"then":{}}', b"-1e400", b"false"),
)
_AVRO: Final = (
    (
        b'{"type":"record","name":"r","fields":[{"name":"a","type":"long"},{"name":"b","type":["null","string"]}]}',
        b"\x02\x02\x02x",
        b'"long"',
    ),
    (b'{"type":"array","items":{"type":"map","values":"double"}}', b"\x02\x00\x00", b'{"type":"array","items":"bytes"}'),
    (b'{"type":"enum","name":"e","symbols":["A","B"]}', b"\x02", b'{"type":"fixed","name":"f","size":4}'),
    (
        b'{"type":"bytes","logicalType":"decimal","precision":9,"scale":2}',
        b"\x04\x01\x02",
        b'{"type":"long","logicalType":"timestamp-micros"}',
    ),
)
_PROTOBUF: Final = (
    (b'syntax = "proto3"; message A { int64 a = 1; repeated string b = 2; }', b"\x08\x01\x12\x01x", b'syntax = "proto3"; message A {}'),
    (b'syntax = "proto3"; message A { map<string, A> m = 1; oneof o { bool x = 2; E e = 3; } enum E { Z = 0; } }', b"\x10\x01", b""),
    (b'syntax = "proto2"; package p; message A { required bytes v = 1 [default = "x"]; reserved 5 to 9; }', b"\x0a\x00", b""),
)


def _joined(samples: tuple[tuple[bytes, bytes, bytes], ...]) -> Callable[[], list[bytes]]:
    return lambda: [SEPARATOR.join(sample) for sample in samples]


# Arrow input, as DoPut takes it.


def _arrow(data: bytes) -> None:
    try:
        reader = pa.ipc.open_stream(io.BytesIO(data[1:]))
        schema, batches = reader.schema, list(reader)
    except (pa.ArrowException, OSError, ValueError, EOFError):
        return  # Arrow rejects it first
    try:
        splitter = Splitter(schema, Target("t" if data[0] % 2 else None, None, 0), lambda topic: 3)
        for batch in batches:
            check_rows(batch)
            for chunk in splitter.chunks(batch):
                assert len(chunk.batch) > 0
    except BrokerError:
        return


def _arrow_seeds() -> list[bytes]:
    headers = pa.list_(pa.struct([("key", pa.string()), ("value", pa.binary())]))
    tables = [
        pa.record_batch({"value": pa.array([b"a", None, b"bc"], pa.binary())}),
        pa.record_batch({"value": pa.array(["a", "b"]), "key": pa.array([b"k", None], pa.binary()), "topic": pa.array(["t", "u"])}),
        pa.record_batch({"value": pa.array(["a", "b"]).dictionary_encode(), "partition": pa.array([0, 2], pa.int32())}),
        pa.record_batch({"value": pa.array([b"v"], pa.large_binary()), "timestamp": pa.array([1], pa.timestamp("us", "UTC"))}),
        pa.record_batch({"value": pa.array([b"v"], pa.binary_view()), "headers": pa.array([[{"key": "h", "value": b"1"}]], headers)}),
        pa.record_batch({"value": pa.array([b"abcd"], pa.binary(4))}),
    ]
    seeds = []
    for table in tables:
        sink = io.BytesIO()
        with pa.ipc.new_stream(sink, table.schema) as writer:
            writer.write_batch(table)
        seeds += [b"\x00" + sink.getvalue(), b"\x01" + sink.getvalue()]
    return seeds


def _flight_requests(data: bytes) -> None:
    kinds: list[type[request.Request]] = [request.Range, *request.ACTIONS.values()]
    kind: type[request.Request] = kinds[data[0] % len(kinds)] if data else request.Range
    try:
        request.decode(data[1:], kind, "request")
    except InvalidRequest:
        pass
    try:
        request.decode_put(data[1:])
    except InvalidRequest:
        pass


def _flight_seeds() -> list[bytes]:
    puts: list[request.Request] = [request.Append("t"), request.Stage("h", "app", "t", "run", 1)]
    requested: list[request.Request] = [request.Publish("app", 1, ["h"], "run", 0), request.Describe(["t"]), request.LastVersion("app")]
    kinds: list[type[request.Request]] = [request.Range, *request.ACTIONS.values()]
    return [b"\x00" + request.encode(put) for put in puts] + [bytes([kinds.index(type(one))]) + request.encode(one) for one in requested]


# What lies on disk: damage must be named, never believed. The checksum is not looked at, so that what comes after it is reached.


def _batch(data: bytes) -> None:
    try:
        batch = StoredBatch.parse(data, verify=False)
        for record in batch.records():
            assert record.offset >= batch.header.base_offset
    except CorruptData:
        return


def _batch_seeds() -> list[bytes]:
    headers = [(("h", b"1"),), (), (("a", b""), ("a", b"2"))]
    runs = [
        RecordBatch([b"a", b"bb", b"ccc"]),
        RecordBatch([b"a", None, b"c"], keys=[b"k", None, b"l"], headers=headers, timestamps=[1, 2, 3], expiries=[0, 9, 0]),
    ]
    return [encode(7, 40, run, now=5, compress=compress) for run in runs for compress in (False, True)]


def _manifest(data: bytes) -> None:
    Manifest.decode(data)


def _manifest_seeds() -> list[bytes]:
    return [Manifest(3, 9, 4, {1: Checkpointed(0, 5, 0, 64), 3: Checkpointed(2, 8, 2, 128)}, {2: 1}).encode()]


TARGETS: Final[Mapping[str, FuzzTarget]] = {
    "blipmq": FuzzTarget(_blipmq, lambda: _with_cut(raw for raw, _ in GOLDEN.values())),
    "figg": FuzzTarget(_figg, lambda: _with_cut(raw for name, raw in vars(streams).items() if name.isupper() and isinstance(raw, bytes))),
    "flymq": FuzzTarget(_flymq, _flymq_requests),
    "flymq-replies": FuzzTarget(_flymq_replies, _flymq_reply_seeds),
    "fujin": FuzzTarget(
        _fujin,
        lambda: _with_cut(sample[0] for group in (fujin_samples.REQUESTS, fujin_samples.REPLIES) for sample in group.values()),
    ),
    "rustlog": FuzzTarget(_rustlog, lambda: _with_cut(frame for _, frame, _ in REQUEST_FRAMES)),
    "rustlog-replies": FuzzTarget(_rustlog_replies, lambda: _with_cut(frame for _, frame, _ in REPLY_FRAMES)),
    "json-schema": FuzzTarget(_schema(SchemaType.JSON), _joined(_JSON)),
    "avro": FuzzTarget(_schema(SchemaType.AVRO), _joined(_AVRO)),
    "protobuf": FuzzTarget(_schema(SchemaType.PROTOBUF), _joined(_PROTOBUF)),
    "arrow": FuzzTarget(_arrow, _arrow_seeds),
    "flight-requests": FuzzTarget(_flight_requests, _flight_seeds),
    "batch": FuzzTarget(_batch, _batch_seeds),
    "manifest": FuzzTarget(_manifest, _manifest_seeds),
}
