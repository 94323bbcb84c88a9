"""Messages about schemas, of every kind."""

from __future__ import annotations

from headrace.wire.flymq import advanced_messages as v
from headrace.wire.flymq import schema_messages as s
from headrace.wire.flymq.messages import Done, Reply, Request

_ENTRY = s.SchemaEntry("order", "json", 2)

REQUESTS: list[Request] = [
    s.RegisterSchema("order", s.SchemaWord("json"), b'{"type":"object"}'),
    s.RegisterSchema("order", s.SchemaWord("avro", narrow=False), b'"long"', "full"),
    s.GetSchema("order"),
    s.GetSchema("order", 3),
    s.ListSchemas(),
    s.ListSchemas("order"),
    s.ValidateSchema("order", b"{}"),
    s.ProduceWithSchema("orders", "order", b"{}"),
    s.ProduceWithSchema("orders", "order", b"", b"k", 2),
    s.DeleteSchema("order", 1),
    s.DeleteSchema("order"),
]

REPLIES: list[tuple[int, Reply]] = [
    (0x10, _ENTRY),
    (0x11, s.SchemaReply([_ENTRY], "order-v2", b"{}", "backward", 1_700_000_000)),
    (0x12, s.SchemaEntries([])),
    (0x12, s.SchemaEntries([s.SchemaEntry("order-v1", "json", 1), s.SchemaEntry("order-v2", "json", 2)])),
    (0x13, s.Validated(True, [])),
    (0x13, s.Validated(False, ["/a: missing", "/b: missing"])),
    (0x14, v.Placed("orders", 0, 7, 1_700_000_000_000, -1, 2)),
    (0x15, Done(True, "schema deleted")),
]
