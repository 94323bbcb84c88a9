"""What a FlyMQ client can ask about users, rules, keys and the audit log.

await client.create_user("ann", "a long password", ["producer"])
await client.manage("rule.add", subject="user:ann", effect="deny", actions=["publish"], kind="topic", name="orders")
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, TypeVar

from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq import messages as m

_Answer = TypeVar("_Answer")


class AccessCalls(ABC):
    """A base of `FlyMqClient`."""

    @abstractmethod
    async def _ask(self, request: m.Request, answer: type[_Answer]) -> _Answer: ...

    async def who_am_i(self) -> a.Identity:
        return await self._ask(a.WhoAmI(), a.Identity)

    async def list_users(self) -> list[a.UserEntry]:
        return (await self._ask(a.UserList(), a.UserEntries)).users

    async def describe_user(self, name: str) -> a.UserEntry:
        """Raises `NoSuchEntry`."""
        return await self._ask(a.UserGet(name), a.UserEntry)

    async def create_user(self, name: str, password: str, roles: Sequence[str] = (), *, enabled: bool = True) -> a.UserEntry:
        """Without a password the user comes by certificate or API key only. Raises `EntryExists`."""
        return await self._ask(a.UserCreate(name, password, "", list(roles), enabled), a.UserEntry)

    async def alter_user(self, name: str, roles: Sequence[str], *, enabled: bool) -> None:
        """Both are overwritten."""
        await self._ask(a.UserUpdate(name, "", "", list(roles), enabled), m.Done)

    async def delete_user(self, name: str) -> None:
        await self._ask(a.UserDelete(name), m.Done)

    async def change_password(self, name: str, new: str, old: str = "") -> None:
        """One's own with the old one, another's by right. Logins with the old one end."""
        await self._ask(a.PasswordChange(name, new, old), m.Done)

    async def list_roles(self) -> list[a.RoleEntry]:
        return (await self._ask(a.RoleList(), a.RoleEntries)).roles

    async def manage(self, verb: str, **arguments: object) -> Any:
        """One of Headrace's own verbs about rules, roles and keys: `rule.add`, `key.create`, … Raises as the broker's verbs do."""
        reply = await self._ask(a.AccessCall(verb, json.dumps(arguments).encode()), a.AccessReply)
        return json.loads(reply.body)

    async def audit(self, query: a.AuditQuery) -> a.AuditPage:
        """Events, the newest first."""
        return await self._ask(query, a.AuditPage)

    async def export_audit(self, query: a.AuditQuery, format: str = "json") -> bytes:
        """The same as one file, `json` or `csv`."""
        return (await self._ask(a.AuditExport(query, format), a.AuditFile)).content


def is_unrepeatable(request: m.Request) -> bool:
    """Whether a second one would not mean the same: a key nobody knows of, a user that is there already."""
    return isinstance(request, a.UserCreate) or (isinstance(request, a.AccessCall) and request.operation == "key.create")
