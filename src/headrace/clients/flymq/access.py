"""FlyMQ calls for users, rules, keys and the audit log.

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
    """Access calls of `FlyMqClient`."""

    @abstractmethod
    async def _request(self, request: m.Request, answer: type[_Answer]) -> _Answer: ...

    async def who_am_i(self) -> a.Identity:
        return await self._request(a.WhoAmI(), a.Identity)

    async def list_users(self) -> list[a.UserEntry]:
        return (await self._request(a.UserList(), a.UserEntries)).users

    async def describe_user(self, name: str) -> a.UserEntry:
        """Return a user. Raises `NoSuchEntry`."""
        return await self._request(a.UserGet(name), a.UserEntry)

    async def create_user(self, name: str, password: str, roles: Sequence[str] = (), *, enabled: bool = True) -> a.UserEntry:
        """Create a user. Without a password, the user needs a certificate or an API key. Raises `EntryExists`."""
        return await self._request(a.UserCreate(name, password, "", list(roles), enabled), a.UserEntry)

    async def alter_user(self, name: str, roles: Sequence[str], *, enabled: bool) -> None:
        """Replace the roles and the enabled state of a user."""
        await self._request(a.UserUpdate(name, "", "", list(roles), enabled), m.Done)

    async def delete_user(self, name: str) -> None:
        await self._request(a.UserDelete(name), m.Done)

    async def change_password(self, name: str, new: str, old: str = "") -> None:
        """Change a password: one's own with the old password, another user's with the admin right. Ends logins with the old password."""
        await self._request(a.PasswordChange(name, new, old), m.Done)

    async def list_roles(self) -> list[a.RoleEntry]:
        return (await self._request(a.RoleList(), a.RoleEntries)).roles

    async def manage(self, operation: str, **arguments: object) -> Any:
        """Call one of Headrace's operations for rules, roles and keys: `rule.add`, `key.create`, … Raises the broker's errors."""
        reply = await self._request(a.AccessCall(operation, json.dumps(arguments).encode()), a.AccessReply)
        return json.loads(reply.body)

    async def audit(self, query: a.AuditQuery) -> a.AuditPage:
        """Return audit events, newest first."""
        return await self._request(query, a.AuditPage)

    async def export_audit(self, query: a.AuditQuery, format: str = "json") -> bytes:
        """Return audit events as a file in `json` or `csv`."""
        return (await self._request(a.AuditExport(query, format), a.AuditFile)).content


def is_unrepeatable(request: m.Request) -> bool:
    """Return whether repeating the request has another effect: a second key, or an error because the user exists."""
    return isinstance(request, a.UserCreate) or (isinstance(request, a.AccessCall) and request.operation == "key.create")
