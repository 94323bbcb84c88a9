from __future__ import annotations

import random

from headrace.wire.blipmq import encoder
from tests.sessions.blipmq.support import rest, running_server
from tests.wire.blipmq.reference import cuts, well_formed


async def test_no_bytes_make_a_session_raise_hang_or_disturb_its_neighbour() -> None:
    async with running_server() as broker:
        neighbour = await broker.client()
        subscription = await neighbour.subscribe("quiet")
        closed = 0
        for number in range(1_500):
            seed = random.Random(number)
            stream = bytearray(well_formed(seed)[: seed.choice((40, 400, 4_000))])
            for _ in range(seed.randint(0, 3)):
                stream[seed.randrange(len(stream))] = seed.randrange(256)
            peer = broker.connect() if number % 3 == 0 else await broker.client()
            for chunk in cuts(bytes(stream), seed):
                peer.session.receive(chunk)
                if seed.random() < 0.2:
                    await rest()
            await rest()
            if peer.wire.closed is not None:
                closed += 1
                assert peer.wire.closed[0].startswith(("bad frame: ", "too many bad keys: "))
            assert peer.wire.pauses == 0
            peer.session.lost()
        assert 100 < closed < 1_400, "both kinds were tried"
        await neighbour.publish("quiet", b"undisturbed")
        assert await neighbour.poll(subscription) == [(1, 1, b"undisturbed")]
        assert await neighbour.exchange(encoder.acks(subscription, [1])) == []
