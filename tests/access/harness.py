"""A broker with access rules on the memory engine, with a manual clock and fast password hashes."""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from argon2 import PasswordHasher

from headrace.access.access import Access, AccessSettings, Mode
from headrace.access.administration import Caller
from headrace.access.passwords import Passwords
from headrace.broker import Broker, Principal
from tests.broker.harness import FragileEngine, HandClock
from tests.canaries import secret

ADMIN_PASSWORD = secret("admin-password")
PASSWORD = secret("password")
ENFORCED = AccessSettings(Mode.ENFORCED)
ADMIN = Caller(Principal("admin", "flymq"), "10.0.0.1")
QUICK = PasswordHasher(time_cost=1, memory_cost=8, parallelism=1)


def bytes_in_order() -> Callable[[int], bytes]:
    """Return a source of random bytes that is the same in every execution and never repeats itself."""
    count = 0

    def take(size: int) -> bytes:
        nonlocal count
        count += 1
        return hashlib.shake_128(count.to_bytes(8, "big")).digest(size)

    return take


def quick_passwords() -> Passwords:
    return Passwords(bytes_in_order(), QUICK)


class Guarded:
    """Broker, access and clock. `admin` has `ADMIN_PASSWORD`."""

    def __init__(
        self,
        settings: AccessSettings = ENFORCED,
        engine: FragileEngine | None = None,
        clock: HandClock | None = None,
        ticks: HandClock | None = None,
    ) -> None:
        self.clock = clock or HandClock()
        self.engine = engine or FragileEngine(clock=self.clock)
        self.passwords = quick_passwords()
        self.access = Access(
            self.engine,
            clock=self.clock,
            random_bytes=bytes_in_order(),
            settings=settings,
            later=self.clock.later,
            passwords=self.passwords,
            ticks=ticks,
        )
        self.broker = Broker(
            self.engine,
            clock=self.clock,
            authorize=self.access.authorize,
            audit_hook=self.access.record_decision,
            later=self.clock.later,
            random_bytes=bytes_in_order(),
        )
        self.access.listen(self.broker.access_changed)
        self.administration = self.access.administration

    async def log_in(self, name: str, password: str = PASSWORD, address: str = "10.0.0.9", protocol: str = "flymq") -> Principal:
        return await self.access.log_in(name, password, Caller(Principal("anonymous", protocol), address))

    async def user(self, name: str, *roles: str) -> Principal:
        """Create a user and log in."""
        await self.administration.create_user(ADMIN, name, PASSWORD, roles)
        return await self.log_in(name)


@asynccontextmanager
async def guarded(settings: AccessSettings = ENFORCED) -> AsyncIterator[Guarded]:
    harness = Guarded(settings)
    await harness.broker.open()
    await harness.access.open(ADMIN_PASSWORD)
    try:
        yield harness
    finally:
        await harness.access.close()
        await harness.broker.close()
