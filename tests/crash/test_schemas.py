"""Schemas across kill -9: an acknowledged version is present as registered, and no number is assigned twice."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from headrace.clients.flymq.client import FlyMqClient
from headrace.errors import HeadraceError
from tests.conftest import Proof
from tests.crash.serving import Broker, BrokerDied, check_directory, serving

pytestmark = pytest.mark.kill_loop

CYCLES = 8
NAMES = ("orders", "clicks")


@dataclass
class Book:
    """Registrations sent and acknowledged."""

    acknowledged: dict[tuple[str, int], bytes] = field(default_factory=dict)
    tried: set[bytes] = field(default_factory=set)
    count: int = 0

    def next_definition(self) -> bytes:
        """Padding that makes a registration larger than one page of the disk."""
        self.count += 1
        text = json.dumps({"const": self.count, "description": "x" * 6_000}).encode()
        self.tried.add(text)
        return text

    def check(self, name: str, version: int, definition: bytes) -> None:
        assert definition in self.tried, f"{name} v{version} was never registered"
        known = self.acknowledged.setdefault((name, version), definition)
        assert known == definition, f"{name} v{version} is another definition than it was"


async def _register(address: tuple[str, int], book: Book) -> None:
    """Register schemas until the broker is gone."""
    with contextlib.suppress(HeadraceError, OSError):
        async with await FlyMqClient.connect(*address) as client:
            while True:
                for name in NAMES:
                    definition = book.next_definition()
                    version = await client.register_schema(name, "json", definition, compatibility="none")
                    assert (name, version) not in book.acknowledged, f"{name} v{version} was given before"
                    book.acknowledged[name, version] = definition


async def _check(address: tuple[str, int], book: Book) -> None:
    wanted = dict(book.acknowledged)
    async with await FlyMqClient.connect(*address) as client:
        for name in NAMES:
            versions = [found.version for found in await client.schemas(name)]
            assert versions == sorted(set(versions))
            for version in versions:
                book.check(name, version, (await client.schema(name, version)).definition)
                wanted.pop((name, version), None)
    assert wanted == {}, f"lost: {sorted(wanted)}"


async def _live(broker: Broker, address: tuple[str, int], book: Book, seconds: float) -> None:
    await _check(address, book)
    registering = asyncio.create_task(_register(address, book))
    with contextlib.suppress(subprocess.TimeoutExpired):
        await asyncio.to_thread(broker.process.wait, seconds)  # the tracer may have killed it first
    await asyncio.to_thread(broker.kill)
    registering.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await registering


def _tracer(rng: random.Random) -> list[str]:
    call = rng.choice(("pwritev2", "fdatasync"))
    moment = f"inject={call}:signal=SIGKILL:when={rng.randrange(6, 40)}"
    return ["strace", "-f", "-qq", "-o", "/dev/null", "-e", f"trace={call}", "-e", moment]


def test_a_registered_version_survives_and_no_number_is_given_twice(tmp_path: Path, proof: Proof) -> None:
    rng, book, kills = random.Random(7), Book(), 0
    for cycle in range(CYCLES):
        traced = cycle % 2 == 1
        with serving(tmp_path, tracer=_tracer(rng) if traced else ()) as broker:
            try:
                address = broker.wait_ready()
                asyncio.run(_live(broker, address, book, 5.0 if traced else rng.uniform(0.1, 0.6)))
            except (BrokerDied, HeadraceError, OSError):
                if not traced:
                    raise  # the tracer may kill the broker before it is ready
        assert broker.process.returncode != 0
        kills += 1
    with serving(tmp_path) as broker:
        asyncio.run(_check(broker.wait_ready(), book))
        assert broker.stop() == 0, broker.output()[-2000:]
    assert check_directory(tmp_path).returncode == 0
    assert kills == CYCLES and len(book.acknowledged) > 2 * CYCLES
    proof("schema versions acknowledged under kill -9", len(book.acknowledged))
