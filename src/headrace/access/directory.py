"""The tables of users, roles, rules and keys.

Each change is one append with its audit event. The tables show only durable changes. Changes run one at a time, so that none is based
on a state that another is changing.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final, TypeAlias

from headrace.access.audit import Audit, Event
from headrace.access.policy import BUILT_IN_ROLES, Key, Policy, Role, User
from headrace.access.rows import KeyRow, RoleRow, RuleKey, RuleRow, UserRow, rule_of
from headrace.broker.tables import K, Staged, Table, TableLog, V
from headrace.engine.contract import Engine, Write, known, when_known

Follow: TypeAlias = Callable[[Staged], None]
ADMIN: Final = "admin"
"""The role that allows everything. There is always an enabled user that has it."""


@dataclass(slots=True)
class Changes:
    """Changes to each table; None deletes."""

    users: dict[str, UserRow | None] = field(default_factory=dict)
    roles: dict[str, RoleRow | None] = field(default_factory=dict)
    rules: dict[RuleKey, RuleRow | None] = field(default_factory=dict)
    keys: dict[str, KeyRow | None] = field(default_factory=dict)


class Directory:
    """`changed` is called whenever the tables change."""

    def __init__(self, engine: Engine, audit: Audit, changed: Callable[[], None]) -> None:
        self._engine, self._audit, self._changed = engine, audit, changed
        self._users = Table(engine, "__users", tuple[str], UserRow)
        self._roles = Table(engine, "__roles", tuple[str], RoleRow)
        self._rules = Table(engine, "__acls", tuple[str, str, str, str, str], RuleRow)
        self._keys = Table(engine, "__keys", tuple[str], KeyRow)
        self._turn = asyncio.Lock()
        self._staged: Staged | None = None

    @property
    def tables(self) -> list[TableLog[Any, Any]]:
        return [self._users, self._roles, self._rules, self._keys]

    async def load(self) -> None:
        """Load the tables, or what is new in them."""
        for table in self.tables:
            await table.load()
        await self._audit.load()

    @property
    def users(self) -> Mapping[str, UserRow]:
        return {name: row for (name,), row in self._users.rows.items()}

    @property
    def roles(self) -> Mapping[str, Role]:
        """All roles, including the built-in ones, which cannot be changed."""
        return {**{name: row.role() for (name,), row in self._roles.rows.items()}, **BUILT_IN_ROLES}

    @property
    def rules(self) -> Mapping[RuleKey, RuleRow]:
        return self._rules.rows

    @property
    def keys(self) -> Mapping[str, KeyRow]:
        return {id: row for (id,), row in self._keys.rows.items()}

    def user(self, name: str) -> UserRow | None:
        return self._users.rows.get((name,))

    def key(self, id: str) -> KeyRow | None:
        return self._keys.rows.get((id,))

    def admins(self) -> set[str]:
        """Return the users that can administer the broker."""
        return {name for name, row in self.users.items() if row.enabled and ADMIN in row.roles}

    def policy(self, now: int) -> Policy:
        """Return the policy at this time."""
        return Policy(
            users={name: User(frozenset(row.roles), row.enabled, row.generation) for name, row in self.users.items()},
            roles=self.roles,
            rules=[rule_of(key, row) for key, row in self.rules.items()],
            keys={
                id: Key(row.owner, tuple(scope.grant() for scope in row.scopes)) for id, row in self.keys.items() if is_in_force(row, now)
            },
        )

    def next_expiry(self, now: int) -> int | None:
        """Return when the next key expires."""
        return min((row.expires_ms for row in self.keys.values() if row.expires_ms > now and not row.revoked_ms), default=None)

    @asynccontextmanager
    async def changing(self) -> AsyncIterator[None]:
        """Serialize changes. What was read from the tables before must be read again inside."""
        async with self._turn:
            if self._staged is not None:
                # The previous caller may have been cancelled before its change was durable.
                await asyncio.wait([self._staged])
                await asyncio.sleep(0)
            yield

    async def commit(self, changes: Changes, event: Event) -> None:
        """Append the changes with the event. Durable, shown and in force when it returns. Call only inside `changing`."""
        writes: list[Write] = []
        follows: list[Follow] = []
        _join(self._users, [((name,), user) for name, user in changes.users.items()], writes, follows)
        _join(self._roles, [((name,), role) for name, role in changes.roles.items()], writes, follows)
        _join(self._rules, list(changes.rules.items()), writes, follows)
        _join(self._keys, [((id,), key) for id, key in changes.keys.items()], writes, follows)
        staged = self._engine.append([*writes, self._audit.write(event)])
        for follow in follows:
            follow(staged)
        when_known(staged, lambda _: self._changed())
        self._staged = known(staged)
        await asyncio.shield(staged)


def _join(table: Table[K, V], rows: Sequence[tuple[K, V | None]], writes: list[Write], follows: list[Follow]) -> None:
    if rows:
        writes.append(table.write(rows))
        follows.append(partial(table.follow, changes=rows))


def is_in_force(row: KeyRow, now: int) -> bool:
    return not row.revoked_ms and (not row.expires_ms or now < row.expires_ms)
