"""Expensive requests to a broker process."""

from __future__ import annotations

import signal
import socket
from pathlib import Path

from headrace.wire.flymq import Dialect, ReplyDecoder, decode_reply, encode_request
from headrace.wire.flymq.messages import (
    CreateTopic,
    Fetch,
    ListTopics,
    ProduceBatch,
    RecordMetadataBatch,
    Reply,
    ReplyFrame,
    Request,
    TopicList,
)
from headrace.wire.flymq.schema_messages import RegisterSchema, SchemaWord, Validated, ValidateSchema
from tests.server.process import DEADLINE_SECONDS, BrokerProcess

WRONG_EVERYWHERE = b"[" + b"0," * (1 << 20) + b"0]"


class Peer:
    """A FlyMQ client on a plain socket."""

    def __init__(self, address: tuple[str, int]) -> None:
        self.socket = socket.create_connection(address, DEADLINE_SECONDS)
        self._decoder = ReplyDecoder()

    def send(self, request: Request) -> None:
        self.socket.sendall(encode_request(request))

    def reply(self) -> Reply:
        while True:
            for event in self._decoder.feed(self.socket.recv(1 << 16)):
                if isinstance(event, RecordMetadataBatch):
                    return event
                assert isinstance(event, ReplyFrame)
                return decode_reply(event, Dialect.SPEC)

    def ask(self, request: Request) -> Reply:
        self.send(request)
        return self.reply()


def test_a_value_that_is_wrong_everywhere_is_judged_while_others_are_served(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        peer, other = Peer(broker.addresses[0]), Peer(broker.addresses[0])
        peer.ask(RegisterSchema("s", SchemaWord("json"), b'{"items":{"type":"string"}}'))
        peer.send(ValidateSchema("s", WRONG_EVERYWHERE))
        assert other.ask(ListTopics()) == TopicList([])
        assert peer.reply() == Validated(False, ['/0: 0 is not of type "string"'])
        code, _, errors = broker.stop()
        assert code == 0, errors


def test_a_search_does_not_keep_the_broker_from_stopping(tmp_path: Path) -> None:
    with BrokerProcess(tmp_path) as broker:
        peer = Peer(broker.addresses[0])
        peer.ask(CreateTopic("large", 1))
        for _ in range(16):
            peer.ask(ProduceBatch("large", [b"0123456789" * 100_000]))
        searchers = [Peer(broker.addresses[0]) for _ in range(4)]
        for searcher in searchers:
            searcher.send(Fetch("large", 0, 0, 1, "n(o|0)thing+x"))
        assert peer.ask(ListTopics()) == TopicList(["large"])
        code, _, errors = broker.stop(signal.SIGTERM)
        assert code == 0, errors
