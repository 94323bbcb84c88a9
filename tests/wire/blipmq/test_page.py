"""The examples of docs/protocols/blipmq.md are what they say."""

from __future__ import annotations

import re
from pathlib import Path

from headrace.server.config import SETTINGS
from headrace.wire.blipmq import AckBatch, Auth, Hello, Message, Nack, Ping, PollBatch, Pong, PublishBatch, Subscribe
from tests.wire.blipmq.reference import decode

PAGE = (Path(__file__).parents[3] / "docs" / "protocols" / "blipmq.md").read_text(encoding="utf-8")
EXAMPLES: list[tuple[str, Message]] = [
    ("HELLO, version 1", Hello(1, 1)),
    ("AUTH dev-key", Auth(2, b"dev-key")),
    ("ACK of the HELLO", AckBatch(0, [1])),
    ("ACK of the AUTH", AckBatch(0, [2])),
    ("SUBSCRIBE demo, QoS 1", Subscribe(3, "demo", 1)),
    ("ACK: it is subscription 42", AckBatch(42, [3])),
    ('PUBLISH "hi" to demo, QoS 1', PublishBatch(1, "demo", [4], [b"hi"])),
    ("POLL subscription 42", PollBatch(42, [5])),
    ("PUBLISH: the message, delivery tag 1", PublishBatch(1, "demo", [1], [b"hi"])),
    ("ACK delivery tag 1", AckBatch(42, [1])),
    ("PING", Ping(56)),
    ("PONG: everything before it is durable", Pong(56)),
    ("NACK 401 unauthenticated", Nack(5, 401, "unauthenticated")),
]


def test_every_line_of_hex_decodes_to_what_is_written_beside_it() -> None:
    lines = [line for block in re.findall(r"```hex\n(.*?)```", PAGE, re.DOTALL) for line in block.splitlines()]
    found = [re.fullmatch(r"([0-9a-f ]+?) {2,}(\S.*)", line) for line in lines]
    assert all(found)
    read = [(match[2], decode([bytes.fromhex(match[1])])) for match in found if match is not None]
    assert read == [(text, [message]) for text, message in EXAMPLES]


def test_every_setting_is_on_the_page_with_its_default() -> None:
    shown = dict(re.findall(r"^\| `([a-z_.]+)` \| ([^|]+?) \|", PAGE[PAGE.index("## Settings") :], re.MULTILINE))
    assert {name for name in SETTINGS if name.startswith("blipmq.")} == {name for name in shown if name.startswith("blipmq.")}
    for name, default in shown.items():
        setting = SETTINGS[name]
        plain = setting.kind.plain(setting.default)
        assert default == ("one is made" if plain == [] else "false" if plain is False else str(plain)), name
