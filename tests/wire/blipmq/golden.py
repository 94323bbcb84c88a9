"""Reference bytes of BlipMQ, each with its message."""

from __future__ import annotations

from headrace.wire.blipmq import AckBatch, Auth, Hello, Message, Nack, Pong, PublishBatch, Subscribe

GOLDEN: dict[str, tuple[bytes, Message]] = {
    name: (bytes.fromhex(hexed), message)
    for name, hexed, message in (
        ("hello", "0000000b 01 0000000000000001 0001", Hello(1, 1)),
        ("auth", "00000012 02 0000000000000002 0007 6465762d6b6579", Auth(2, b"dev-key")),
        ("subscribe", "00000010 04 0000000000000003 0004 64656d6f 01", Subscribe(3, "demo", 1)),
        ("publish", "00000012 03 0000000000000004 01 0004 64656d6f 6869", PublishBatch(1, "demo", [4], [b"hi"])),
        ("ack", "00000011 05 0000000000000003 000000000000002a", AckBatch(42, [3])),
        ("pong", "00000009 08 0000000000000038", Pong(56)),
        ("nack", "0000001c 06 0000000000000005 0191 000f 756e61757468656e74696361746564", Nack(5, 401, "unauthenticated")),
    )
}
