"""Passwords: argon2id, hashed on two threads with a short queue.

A hash takes 0.1 s and 64 MiB, on purpose. Many logins at once therefore use at most two threads and the loop keeps serving. When the
queue is full, a login fails as retriable before any work is done.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Final, TypeVar

from argon2 import PasswordHasher, Type
from argon2.exceptions import InvalidHashError, VerificationError

from headrace.errors import InvalidRequest, Unavailable
from headrace.limits import PASSWORD_BYTES_MAX, PASSWORD_CHARACTERS_MIN, PASSWORD_JOBS_QUEUED_MAX, PASSWORD_JOBS_RUNNING

_SALT_BYTES: Final = 16
_T = TypeVar("_T")

HASHER: Final = PasswordHasher(time_cost=3, memory_cost=64 * 1024, parallelism=2, hash_len=32, salt_len=_SALT_BYTES, type=Type.ID)
"""Parameters of new hashes. A stored hash contains its own, so these may change."""


def check_password(password: str) -> None:
    """Raises `InvalidRequest`, without the password in the message."""
    if len(password) < PASSWORD_CHARACTERS_MIN:
        raise InvalidRequest(f"a password needs at least {PASSWORD_CHARACTERS_MIN} characters")
    if len(password.encode("utf-8", "surrogatepass")) > PASSWORD_BYTES_MAX:
        raise InvalidRequest(f"a password has at most {PASSWORD_BYTES_MAX} bytes")


class Passwords:
    """`random_bytes` creates salts."""

    def __init__(self, random_bytes: Callable[[int], bytes], hasher: PasswordHasher = HASHER) -> None:
        self._random_bytes = random_bytes
        self._hasher = hasher
        self._threads = ThreadPoolExecutor(PASSWORD_JOBS_RUNNING, thread_name_prefix="password")
        self._jobs = 0
        self._unused_hash = ""

    async def hash(self, password: str) -> str:
        """Hash a password. Raises `InvalidRequest` for one that is too short or too long, `Unavailable` when too many are waiting."""
        check_password(password)
        return await self._in_thread(lambda: self._hasher.hash(password, salt=self._random_bytes(_SALT_BYTES)))

    async def verify(self, hash: str, password: str) -> bool:
        """Return whether the password matches. An empty hash never matches, and takes as long. Raises `Unavailable` as `hash` does."""
        if len(password.encode("utf-8", "surrogatepass")) > PASSWORD_BYTES_MAX:
            password = ""
        if not self._unused_hash:
            self._unused_hash = await self._in_thread(lambda: self._hasher.hash("", salt=self._random_bytes(_SALT_BYTES)))
        fits = await self._in_thread(lambda: self._fits(hash or self._unused_hash, password))
        return fits and bool(hash)

    def is_outdated(self, hash: str) -> bool:
        """Return whether the hash has outdated parameters. It is then replaced at the next login."""
        return self._hasher.check_needs_rehash(hash)

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _fits(self, hash: str, password: str) -> bool:
        try:
            return self._hasher.verify(hash, password)
        except (VerificationError, InvalidHashError):
            return False

    async def _in_thread(self, job: Callable[[], _T]) -> _T:
        if self._jobs >= PASSWORD_JOBS_RUNNING + PASSWORD_JOBS_QUEUED_MAX:
            raise Unavailable("too many logins are waiting")
        self._jobs += 1
        future = self._threads.submit(job)
        # Counted until the thread is done: a cancelled caller does not make room for another.
        loop = asyncio.get_running_loop()
        future.add_done_callback(lambda _: _call_if_open(loop, self._done))
        return await asyncio.wrap_future(future)

    def _done(self) -> None:
        self._jobs -= 1


def _call_if_open(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> None:
    try:
        loop.call_soon_threadsafe(callback)
    except RuntimeError:
        pass  # the loop is closed and the count no longer matters
