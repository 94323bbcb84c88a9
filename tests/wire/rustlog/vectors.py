"""The examples of the specification and of the binary dialect, as frames and as the messages they mean."""

from __future__ import annotations

from typing import Final

from headrace.wire.rustlog import messages as m
from headrace.wire.rustlog.messages import Dialect

JSON, BINARY = Dialect.JSON, Dialect.BINARY


def framed(payload: str | bytes) -> bytes:
    raw = payload.encode() if isinstance(payload, str) else payload
    return len(raw).to_bytes(4, "big") + raw


def from_hex(text: str) -> bytes:
    return bytes.fromhex(text)


# Requests of the specification, as printed there (white space and all).
SPEC_REQUESTS: Final[list[tuple[str, m.Request]]] = [
    (
        """{
  "Fetch": {
    "topic": "orders",
    "partition": 0,
    "offset": 1000,
    "max_bytes": 1048576,
    "group_id": "order-processor"
  }
}""",
        m.Fetch("orders", 0, 1000, 1048576, "order-processor"),
    ),
    (
        """{
  "OffsetCommit": {
    "topic": "orders",
    "partition": 0,
    "group_id": "order-processor",
    "offset": 1500
  }
}""",
        m.OffsetCommit("orders", 0, "order-processor", 1500),
    ),
    (
        """{
  "OffsetFetch": {
    "topic": "orders",
    "partition": 0,
    "group_id": "order-processor"
  }
}""",
        m.OffsetFetch("orders", 0, "order-processor"),
    ),
    (
        """{
  "Produce": {
    "topic": "orders",
    "partition": 0,
    "records": [[10, 20], [30, 40]]
  }
}""",
        m.Produce("orders", 0, [b"\x0a\x14", b"\x1e\x28"]),
    ),
    (
        """{
  "Produce": {
    "topic": "orders",
    "partition": 0,
    "records": [[50, 60]]
  }
}""",
        m.Produce("orders", 0, [b"\x32\x3c"]),
    ),
    (
        """{
  "Fetch": {
    "topic": "orders",
    "partition": 0,
    "offset": 0,
    "max_bytes": 1048576,
    "group_id": "processor"
  }
}""",
        m.Fetch("orders", 0, 0, 1048576, "processor"),
    ),
    (
        """{
  "OffsetCommit": {
    "topic": "orders",
    "partition": 0,
    "group_id": "processor",
    "offset": 2
  }
}""",
        m.OffsetCommit("orders", 0, "processor", 2),
    ),
    (
        """{
  "Fetch": {
    "topic": "nonexistent",
    "partition": 0,
    "offset": 0,
    "max_bytes": 1048576,
    "group_id": null
  }
}""",
        m.Fetch("nonexistent", 0, 0, 1048576),
    ),
]

# Replies of the specification, as printed there.
SPEC_REPLIES: Final[list[tuple[str, m.Reply]]] = [
    ('{\n  "Produce": {\n    "offsets": [1000, 1001, 1002]\n  }\n}', m.ProduceReply(range(1000, 1003))),
    ('{\n  "Produce": {\n    "offsets": [1000, 1001]\n  }\n}', m.ProduceReply(range(1000, 1002))),
    ('{\n  "Produce": {\n    "offsets": [1002]\n  }\n}', m.ProduceReply(range(1002, 1003))),
    (
        """{
  "Fetch": {
    "records": [
      { "offset": 1000, "payload": [98, 121, 116, 101, 115] },
      { "offset": 1001, "payload": [109, 111, 114, 101] }
    ],
    "next_offset": 1002
  }
}""",
        m.FetchReply(range(1000, 1002), [b"bytes", b"more"], 1002),
    ),
    (
        """{
  "Fetch": {
    "records": [
      { "offset": 0, "payload": [10, 20] },
      { "offset": 1, "payload": [30, 40] }
    ],
    "next_offset": 2
  }
}""",
        m.FetchReply(range(0, 2), [b"\x0a\x14", b"\x1e\x28"], 2),
    ),
    (
        """{
  "Fetch": {
    "records": [
      { "offset": 100, "payload": [10, 20] },
      { "offset": 101, "payload": [30, 40] }
    ],
    "next_offset": 102
  }
}""",
        m.FetchReply(range(100, 102), [b"\x0a\x14", b"\x1e\x28"], 102),
    ),
    ('{\n  "OffsetCommit": {\n    "success": true\n  }\n}', m.OffsetCommitReply(True)),
    ('{\n  "OffsetFetch": {\n    "offset": 1500\n  }\n}', m.OffsetFetchReply(1500)),
    ('{\n  "OffsetFetch": {\n    "offset": null\n  }\n}', m.OffsetFetchReply(None)),
    (
        '{\n  "Error": {\n    "message": "partition not found: topic=orders, partition=99"\n  }\n}',
        m.ErrorReply("partition not found: topic=orders, partition=99"),
    ),
    (
        '{\n  "Error": {\n    "message": "partition not found: topic=nonexistent, partition=0"\n  }\n}',
        m.ErrorReply("partition not found: topic=nonexistent, partition=0"),
    ),
]

# Invalid examples of the specification: JSON has no `//` comments. Each is an error as printed, and decodes to the message beside it
# without the comments.
SPEC_COMMENTED: Final[list[tuple[str, m.Request | m.Reply]]] = [
    (
        """{
  "Produce": {
    "topic": "orders",
    "partition": 0,
    "records": [
      [98, 121, 116, 101, 115],  // "bytes" as byte array
      [109, 111, 114, 101]       // "more"
    ]
  }
}""",
        m.Produce("orders", 0, [b"bytes", b"more"]),
    ),
    (
        """{
  "Fetch": {
    "topic": "orders",
    "partition": 0,
    "offset": 0,        // Client requests 0
    "max_bytes": 1048576,
    "group_id": "processor"
  }
}""",
        m.Fetch("orders", 0, 0, 1048576, "processor"),
    ),
    (
        """{
  "Fetch": {
    "records": [
      { "offset": 2, "payload": [50, 60] }  // Broker returns from offset 2
    ],
    "next_offset": 3
  }
}""",
        m.FetchReply(range(2, 3), [b"\x32\x3c"], 3),
    ),
    (
        """{
  "Fetch": {
    "topic": "orders",
    "partition": 0,
    "offset": 100,
    "max_bytes": 1048576,
    "group_id": null    // No consumer group
  }
}""",
        m.Fetch("orders", 0, 100, 1048576),
    ),
]

# Frames to the byte: what we send, and what we understand.
REQUEST_FRAMES: Final[list[tuple[Dialect, bytes, m.Request]]] = [
    (
        JSON,
        from_hex("00000048") + b'{"Produce":{"topic":"orders","partition":0,"records":[[10,20],[30,40]]}}',
        m.Produce("orders", 0, [b"\x0a\x14", b"\x1e\x28"]),
    ),
    (
        JSON,
        framed('{"Fetch":{"topic":"orders","partition":0,"offset":0,"max_bytes":1024,"group_id":"processor"}}'),
        m.Fetch("orders", 0, 0, 1024, "processor"),
    ),
    (
        JSON,
        framed('{"Fetch":{"topic":"orders","partition":0,"offset":0,"max_bytes":1024,"group_id":null}}'),
        m.Fetch("orders", 0, 0, 1024),
    ),
    (
        JSON,
        framed('{"OffsetCommit":{"topic":"orders","partition":0,"group_id":"processor","offset":2}}'),
        m.OffsetCommit("orders", 0, "processor", 2),
    ),
    (JSON, framed('{"OffsetFetch":{"topic":"orders","partition":0,"group_id":"new"}}'), m.OffsetFetch("orders", 0, "new")),
    (JSON, framed('{"CreateTopic":{"topic":"t","partition_count":2}}'), m.CreateTopic("t", 2)),
    (JSON, framed('{"DescribeTopic":{"topic":"t"}}'), m.DescribeTopic("t")),
    (JSON, framed('{"DescribePartition":{"topic":"t","partition":1}}'), m.DescribePartition("t", 1)),
    (JSON, framed('"ListTopics"'), m.ListTopics()),
    (JSON, framed('"MetricsFetch"'), m.MetricsFetch()),
    (JSON, framed('"Ping"'), m.Ping()),
    (BINARY, from_hex("00000001 ff"), m.Ping()),
    (BINARY, from_hex("00000008 05 0001 74 00000002"), m.CreateTopic("t", 2)),
    (
        BINARY,
        from_hex("0000001d 01 0006 6f7264657273 00000000 00000002 00000002 0a14 00000002 1e28"),
        m.Produce("orders", 0, [b"\x0a\x14", b"\x1e\x28"]),
    ),
    (
        BINARY,
        from_hex("00000018 02 0002 6772 0001 74 00000003 0000000000000007 00000400"),
        m.Fetch("t", 3, 7, 1024, "gr"),
    ),
    (BINARY, from_hex("00000016 02 0000 0001 74 00000003 0000000000000007 00000400"), m.Fetch("t", 3, 7, 1024)),
    (BINARY, from_hex("00000014 03 0002 6772 0001 74 00000000 000000000000002a"), m.OffsetCommit("t", 0, "gr", 42)),
    (BINARY, from_hex("0000000c 04 0002 6772 0001 74 00000000"), m.OffsetFetch("t", 0, "gr")),
    (BINARY, from_hex("00000001 06"), m.ListTopics()),
    (BINARY, from_hex("00000004 07 0001 74"), m.DescribeTopic("t")),
    (BINARY, from_hex("00000008 08 0001 74 00000001"), m.DescribePartition("t", 1)),
    (BINARY, from_hex("00000001 09"), m.MetricsFetch()),
]

REPLY_FRAMES: Final[list[tuple[Dialect, bytes, m.Reply]]] = [
    (JSON, from_hex("0000001d") + b'{"Produce":{"offsets":[0,1]}}', m.ProduceReply(range(0, 2))),
    (JSON, framed('{"Produce":{"offsets":[]}}'), m.ProduceReply(range(0))),
    (JSON, framed('{"Produce":{"offsets":[3,5]}}'), m.ProduceReply([3, 5])),
    (
        JSON,
        framed('{"Fetch":{"records":[{"offset":0,"payload":[10,20]},{"offset":1,"payload":[]}],"next_offset":2}}'),
        m.FetchReply(range(0, 2), [b"\x0a\x14", b""], 2),
    ),
    (
        JSON,
        framed('{"Fetch":{"records":[{"offset":1,"payload":[255]},{"offset":4,"payload":[0]}],"next_offset":5}}'),
        m.FetchReply([1, 4], [b"\xff", b"\x00"], 5),
    ),
    (JSON, framed('{"Fetch":{"records":[],"next_offset":9}}'), m.FetchReply(range(9, 9), [], 9)),
    (JSON, framed('{"OffsetCommit":{"success":true}}'), m.OffsetCommitReply(True)),
    (JSON, framed('{"OffsetCommit":{"success":false}}'), m.OffsetCommitReply(False)),
    (JSON, framed('{"OffsetFetch":{"offset":1500}}'), m.OffsetFetchReply(1500)),
    (JSON, framed('{"OffsetFetch":{"offset":null}}'), m.OffsetFetchReply(None)),
    (JSON, framed('{"CreateTopic":{"success":true}}'), m.CreateTopicReply(True)),
    (JSON, framed('{"ListTopics":{"topics":[["t",2],["u",1]]}}'), m.ListTopicsReply([("t", 2), ("u", 1)])),
    (
        JSON,
        framed('{"DescribeTopic":{"topic":"t","partition_count":2,"partitions":[[0,7],[1,0]]}}'),
        m.DescribeTopicReply("t", 2, [(0, 7), (1, 0)]),
    ),
    (
        JSON,
        framed('{"DescribePartition":{"topic":"t","partition":1,"high_watermark":7}}'),
        m.DescribePartitionReply("t", 1, 7),
    ),
    (JSON, framed('{"Metrics":{"metrics":"up 1\\n"}}'), m.MetricsReply("up 1\n")),
    (JSON, framed('"Pong"'), m.Pong()),
    (
        JSON,
        framed('{"Error":{"message":"partition not found: topic=nonexistent, partition=0"}}'),
        m.ErrorReply("partition not found: topic=nonexistent, partition=0"),
    ),
    (BINARY, from_hex("0000000d 01 0000000000000000 00000003"), m.ProduceReply(range(0, 3))),
    (BINARY, from_hex("0000000d 01 0000000000000009 00000000"), m.ProduceReply(range(9, 9))),
    (
        BINARY,
        from_hex("00000018 02 00000002 00000002 0a14 00000001 ff 0000000000000009"),
        m.FetchReply(range(7, 9), [b"\x0a\x14", b"\xff"], 9),
    ),
    (BINARY, from_hex("0000000d 02 00000000 0000000000000009"), m.FetchReply(range(9, 9), [], 9)),
    (BINARY, from_hex("00000002 03 01"), m.OffsetCommitReply(True)),
    (BINARY, from_hex("00000002 04 00"), m.OffsetFetchReply(None)),
    (BINARY, from_hex("0000000a 04 01 000000000000002a"), m.OffsetFetchReply(42)),
    (BINARY, from_hex("00000002 05 01"), m.CreateTopicReply(True)),
    (BINARY, from_hex("0000000c 06 00000001 0001 74 00000002"), m.ListTopicsReply([("t", 2)])),
    (
        BINARY,
        from_hex("00000018 07 0001 74 00000001 00000001 00000000 0000000000000007"),
        m.DescribeTopicReply("t", 1, [(0, 7)]),
    ),
    (BINARY, from_hex("00000010 08 0001 74 00000001 0000000000000007"), m.DescribePartitionReply("t", 1, 7)),
    (BINARY, from_hex("0000000a 09 00000005 757020310a"), m.MetricsReply("up 1\n")),
    (BINARY, from_hex("00000001 ff"), m.Pong()),
    (BINARY, from_hex("00000008 fe 000a 0003 6e6f21"), m.ErrorReply("no!", 10)),
]
