"""A session answers or closes, whatever its peer sends, and other connections are not affected."""

from __future__ import annotations

import random
from collections.abc import Callable

from headrace.wire.flymq import encode_request
from headrace.wire.flymq.messages import Consume, Consumed, ProduceBatch
from tests.sessions.flymq.support import placed, rest, running_server
from tests.wire.flymq.samples import REQUESTS, chunks

STREAMS = 1_000


async def test_no_bytes_make_a_session_raise_hang_or_disturb_its_neighbour(proof: Callable[[str, int], None]) -> None:
    encoded = [encode_request(request) for request in REQUESTS]
    async with running_server() as server:
        neighbour = server.peer()
        closed = 0
        for number in range(STREAMS):
            dice = random.Random(number)
            stream = bytearray(b"".join(dice.choices(encoded, k=dice.randint(1, 12))))
            for _ in range(dice.randint(0, 3)):
                stream[dice.randrange(len(stream))] = dice.randrange(256)
            peer = server.peer()
            for chunk in chunks(bytes(stream), number, longest=200):
                peer.session.receive(chunk)
                if dice.random() < 0.2:
                    await rest()
            while not peer.session.is_idle:
                await rest()
            if peer.wire.closed is not None:
                closed += 1
                assert peer.wire.closed[0].startswith("bad frame: ")
            assert peer.wire.pauses == 0
            peer.session.lost()
        assert STREAMS // 20 < closed < STREAMS * 19 // 20, "both kinds were tried"
        partition, offset = placed(await neighbour.one(ProduceBatch("quiet", [b"undisturbed"])))
        assert await neighbour.one(Consume("quiet", partition, offset)) == Consumed(b"", b"undisturbed")
    proof("damaged FlyMQ conversations", STREAMS)
