"""Logins: the user of a cookie, and the connection that acts for that user.

A user logs in with the name and password of the broker, which the console keeps only in memory, to reconnect. If the broker's access is
open, there is no login, and all browsers share one connection.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from headrace.clients.errors import ConnectFailed, LoginRefused
from headrace.clients.flymq.client import FlyMqClient
from headrace.console.connection import BrokerAddress, status_of
from headrace.console.samples import Samples
from headrace.errors import HeadraceError

LOGINS_MAX: Final = 200
"""Logins kept. Beyond it, the one that was idle longest ends."""
IDLE_SECONDS: Final = 8 * 3600.0
STREAMS_MAX: Final = 8
"""Live streams of one account."""
_TOKEN_BYTES: Final = 32


class Notice(NamedTuple):
    """Result of an action, shown on the next page."""

    text: str
    command: str = ""
    is_error: bool = False


class Account:
    """A connection to the broker as one user, with its samples."""

    def __init__(self, user: str, client: FlyMqClient, password: str = "") -> None:
        self.user, self.client, self._password = user, client, password
        self.samples = Samples(client)
        self.streams = 0
        self._sampling: asyncio.Task[None] = asyncio.ensure_future(self.samples.run())

    async def another(self, broker: BrokerAddress) -> FlyMqClient:
        """Return one more connection as the same user, for a stream. The caller closes it."""
        return await broker.connect(self.user, self._password)

    async def close(self) -> None:
        self._sampling.cancel()
        await asyncio.gather(self._sampling, return_exceptions=True)
        self.client.abandon()


@dataclass(slots=True)
class Login:
    """A browser with a cookie."""

    id: str
    token: str
    account: Account
    used: float
    notices: list[Notice] = field(default_factory=list)

    @property
    def user(self) -> str:
        return self.account.user


class Logins:
    """All logins by the secret in their cookie."""

    def __init__(self, broker: BrokerAddress, clock: Callable[[], float] = time.monotonic) -> None:
        self.broker, self._clock = broker, clock
        self._by_id: dict[str, Login] = {}
        self._open: Account | None = None
        """The shared account, if access is open."""
        self._opening = asyncio.Lock()
        self._is_open: bool | None = None

    async def is_open(self) -> bool:
        """Return whether the broker lets everybody in. Asked until the broker has answered. Raises `ConnectFailed`."""
        async with self._opening:
            if self._is_open is None:
                client = await self.broker.connect()
                try:
                    self._is_open = (await status_of(client))["access"] == "open"
                except BaseException:
                    client.abandon()
                    raise
                if self._is_open:
                    self._open = Account("", client)
                else:
                    client.abandon()
            return self._is_open

    def find(self, id: str) -> Login | None:
        found = self._by_id.get(id)
        if found is None:
            return None
        if self._open is not None and self._open.samples.access not in ("", "open"):
            self._close_open()
        if self._clock() - found.used > IDLE_SECONDS:
            self._forget(found)
        if found.id not in self._by_id:
            return None
        found.used = self._clock()
        found.account.samples.used_at = time.time()
        return found

    def _close_open(self) -> None:
        """End all logins without a user: the broker was restarted and now requires logins."""
        account, self._open, self._is_open = self._open, None, None
        for login in [login for login in self._by_id.values() if login.account is account]:
            self._forget(login)

    async def enter(self) -> Login | None:
        """Return a new login without a user; None if a login is required."""
        if not await self.is_open():
            return None
        assert self._open is not None, "made when access was found open"
        return self._keep(self._open)

    async def log_in(self, user: str, password: str) -> Login:
        """Log in at the broker, which also throttles. Raises `LoginRefused`, `ConnectFailed`."""
        return self._keep(Account(user, await self.broker.connect(user, password), password))

    def log_out(self, login: Login) -> None:
        self._forget(login)

    async def close(self) -> None:
        accounts = {id(login.account): login.account for login in self._by_id.values()}
        if self._open is not None:
            accounts[id(self._open)] = self._open
        self._by_id.clear()
        await asyncio.gather(*(account.close() for account in accounts.values()))

    def _keep(self, account: Account) -> Login:
        for idle in [login for login in self._by_id.values() if self._clock() - login.used > IDLE_SECONDS]:
            self._forget(idle)
        if len(self._by_id) >= LOGINS_MAX:
            self._forget(min(self._by_id.values(), key=lambda login: login.used))
        made = Login(secrets.token_urlsafe(_TOKEN_BYTES), secrets.token_urlsafe(_TOKEN_BYTES), account, self._clock())
        self._by_id[made.id] = made
        return made

    def _forget(self, login: Login) -> None:
        self._by_id.pop(login.id, None)
        if login.account is not self._open:
            closing = asyncio.ensure_future(login.account.close())
            _closing.add(closing)
            closing.add_done_callback(_closing.discard)


_closing: Final[set[asyncio.Future[None]]] = set()
"""Keeps references to closing accounts: the loop itself holds only weak ones."""


def login_error(failure: HeadraceError) -> str:
    """Return the text for a failed login."""
    if isinstance(failure, LoginRefused):
        return failure.reason
    return failure.reason if isinstance(failure, ConnectFailed) else str(failure)
