"""Logins, users, ACLs, keys and the audit log of FlyMQ.

A FlyMQ ACL names the users of a topic. Headrace's rules have actions, prefixes, groups and denials. ACL_SET writes rules that allow
publishing to, reading and describing that one topic, and the other ACL requests show such rules. Everything else goes through ACCESS: an
operation and its arguments in JSON.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Awaitable, Callable
from functools import cached_property
from typing import Any, Final, get_args

import msgspec

from headrace.access.access import Access
from headrace.access.administration import Caller, TopicAcl
from headrace.access.audit import Noted, Query
from headrace.access.policy import ANONYMOUS, Effect, Grant, Match, Role, Rule
from headrace.access.rows import GrantRow, UserRow, id_of
from headrace.broker.authorizer import Action, Principal, Resource
from headrace.errors import InvalidRequest, LoginFailed, LoginThrottled, Unavailable
from headrace.limits import AUDIT_QUERY_EVENTS_MAX
from headrace.wire.flymq import access_messages as a
from headrace.wire.flymq.messages import Done, Reply

ACCESS_REQUESTS: Final = get_args(a.AccessRequest)
SDK_ROLE: Final = "sdk"
"""Users whose logins are answered in the original's layout, because the request does not tell which layout the client expects."""
_NODE: Final = "headrace"
_EVENTS: Final = 100
"""Default limit of a query."""
_WORDS: Final = {Action.READ: "read", Action.PUBLISH: "write", Action.ADMIN: "admin"}
"""Permissions as the original names them."""


class GrantBody(msgspec.Struct, forbid_unknown_fields=True):
    actions: list[Action]
    kind: str
    name: str
    match: Match = Match.LITERAL

    def grant(self) -> Grant:
        return Grant(frozenset(self.actions), self.kind, self.match, self.name)


class RuleBody(GrantBody, forbid_unknown_fields=True, kw_only=True):
    subject: str
    effect: Effect = Effect.ALLOW

    def rule(self) -> Rule:
        return Rule(self.subject, self.effect, self.grant())


class Nothing(msgspec.Struct, forbid_unknown_fields=True):
    pass


class CheckBody(msgspec.Struct, forbid_unknown_fields=True):
    user: str
    action: Action
    kind: str
    name: str


class RoleBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    grants: list[GrantBody] = []
    description: str = ""


class NameBody(msgspec.Struct, forbid_unknown_fields=True):
    name: str


class NewKeyBody(msgspec.Struct, forbid_unknown_fields=True):
    owner: str
    scopes: list[GrantBody] = []
    expires_ms: int = 0
    description: str = ""


class KeyBody(msgspec.Struct, forbid_unknown_fields=True):
    id: str


class AlterKeyBody(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    expires_ms: int | None = None
    description: str | None = None
    scopes: list[GrantBody] | None = None


class FlyMqAccess:
    """Logins and access requests of one connection. A login changes `who`."""

    @property
    def needs_login(self) -> bool:
        """Whether a login is required and missing. Nothing expensive is done for such a peer."""
        return self._access.is_enforced and self.who.name == ANONYMOUS

    def __init__(self, access: Access, who: Principal, peer: str, logged_in: Callable[[Principal], str | None] = lambda who: None) -> None:
        """`logged_in` is called for each login. It returns an error text if the connection must not be kept."""
        self.who, self._logged_in = who, logged_in
        self._access, self._administration = access, access.administration
        self._address = peer.rpartition(":")[0] or peer

    @cached_property
    def _handlers(self) -> dict[type, Callable[[Any], Awaitable[Reply]]]:
        return {
            a.Auth: self._auth,
            a.WhoAmI: self._who_am_i,
            a.UserCreate: self._user_create,
            a.UserDelete: self._user_delete,
            a.UserUpdate: self._user_update,
            a.UserList: self._user_list,
            a.UserGet: self._user_get,
            a.AclSet: self._acl_set,
            a.AclGet: self._acl_get,
            a.AclDelete: self._acl_delete,
            a.AclList: self._acl_list,
            a.PasswordChange: self._password_change,
            a.RoleList: self._role_list,
            a.AccessCall: self._call,
            a.AuditQuery: self._audit_query,
            a.AuditExport: self._audit_export,
            a.AuditQuerySdk: self._audit_query,
            a.AuditExportSdk: self._audit_export,
        }

    @cached_property
    def calls(self) -> dict[str, tuple[type[msgspec.Struct], Callable[[Any], Awaitable[object]]]]:
        return {
            "rule.list": (Nothing, self._rule_list),
            "rule.add": (RuleBody, self._rule_add),
            "rule.remove": (RuleBody, self._rule_remove),
            "rule.check": (CheckBody, self._rule_check),
            "role.list": (Nothing, self._role_rows),
            "role.put": (RoleBody, self._role_put),
            "role.delete": (NameBody, self._role_delete),
            "key.list": (Nothing, self._key_list),
            "key.get": (KeyBody, self._key_get),
            "key.create": (NewKeyBody, self._key_create),
            "key.alter": (AlterKeyBody, self._key_alter),
            "key.revoke": (KeyBody, self._key_revoke),
            "key.delete": (KeyBody, self._key_delete),
        }

    async def answer(self, request: Any) -> Reply:
        """Answer a request. Raises `BrokerError`."""
        return await self._handlers[type(request)](request)

    @property
    def speaks_sdk(self) -> bool:
        return SDK_ROLE in self._access.roles_of(self.who)

    @property
    def _caller(self) -> Caller:
        return Caller(self.who, self._address)

    # Logins.

    async def _auth(self, request: a.Auth) -> Reply:
        try:
            who = await self._log_in(request.user, request.password)
            error_reply = self._logged_in(who)
            if error_reply is not None:
                raise Unavailable(error_reply)
            self.who = who
        except (LoginFailed, LoginThrottled, Unavailable, InvalidRequest) as error:
            return a.AuthReply(False, str(error))
        return a.AuthReply(True, "", self.who.name, self._access.roles_of(self.who))

    async def _log_in(self, user: str, password: str) -> Principal:
        """Verify a user and a password, or an API key given as the password, with its id or nothing as the user."""
        key = id_of(password)
        if not self._access.is_enforced or not key or user not in ("", key):
            return await self._access.log_in(user, password, self._caller)
        who = self._access.verify_key(password, self._caller)
        if who is None:
            raise LoginFailed
        return who

    async def _who_am_i(self, request: a.WhoAmI) -> Reply:
        roles = self._access.roles_of(self.who)
        return a.Identity(self.who.name != ANONYMOUS, self.who.name, roles, self._permissions(roles))

    async def _password_change(self, request: a.PasswordChange) -> Reply:
        name = request.user or self.who.name
        await self._administration.change_password(self._caller, name, request.password, request.old_password)
        return Done(True, "password changed")

    # Users.

    async def _user_create(self, request: a.UserCreate) -> Reply:
        row = await self._administration.create_user(self._caller, request.user, request.password, request.roles, enabled=request.enabled)
        return self._entry(request.user, row)

    async def _user_delete(self, request: a.UserDelete) -> Reply:
        await self._administration.delete_user(self._caller, request.user)
        return Done(True, request.user)

    async def _user_update(self, request: a.UserUpdate) -> Reply:
        await self._administration.update_user(self._caller, request.user, request.roles, enabled=request.enabled)
        return Done(True, request.user)

    async def _user_list(self, request: a.UserList) -> Reply:
        return a.UserEntries([self._entry(name, row) for name, row in self._administration.users(self._caller).items()])

    async def _user_get(self, request: a.UserGet) -> Reply:
        return self._entry(request.user, self._administration.user(self._caller, request.user))

    def _entry(self, name: str, row: UserRow) -> a.UserEntry:
        return a.UserEntry(name, row.roles, self._permissions(row.roles), row.enabled, row.created_ms // 1000, row.updated_ms // 1000)

    def _permissions(self, roles: list[str]) -> list[str]:
        known = self._administration.roles()
        return sorted({word for role in roles if role in known for word in _permissions(known[role])})

    async def _role_list(self, request: a.RoleList) -> Reply:
        roles = self._access.roles_shown(self.who)
        return a.RoleEntries([a.RoleEntry(name, _permissions(role), role.description) for name, role in roles.items()])

    # FlyMQ's own ACLs.

    async def _acl_set(self, request: a.AclSet) -> Reply:
        await self._administration.set_topic_acl(self._caller, TopicAcl(request.topic, request.public, request.users, request.roles))
        return a.AclDone(True, request.topic)

    async def _acl_get(self, request: a.AclGet) -> Reply:
        acl = self._administration.topic_acl(self._caller, request.topic)
        found = acl or TopicAcl(request.topic, False, [], [])
        return a.AclEntry(found.topic, acl is not None, found.public, not self._access.is_enforced, found.users, found.roles)

    async def _acl_delete(self, request: a.AclDelete) -> Reply:
        await self._administration.delete_topic_acl(self._caller, request.topic)
        return a.AclDone(True, request.topic)

    async def _acl_list(self, request: a.AclList) -> Reply:
        acls = self._administration.topic_acls(self._caller)
        return a.AclEntries([a.AclRow(acl.topic, True, acl.public, acl.users, acl.roles) for acl in acls], not self._access.is_enforced)

    # Operations of ACCESS.

    async def _call(self, request: a.AccessCall) -> Reply:
        found = self.calls.get(request.operation)
        if found is None:
            raise InvalidRequest(f"unknown operation {request.operation[:40]!r}")
        body, operation = found
        try:
            arguments = msgspec.json.decode(request.body or b"{}", type=body)
        except (msgspec.MsgspecError, UnicodeDecodeError) as error:
            raise InvalidRequest(f"{request.operation}: {error}") from None
        except RecursionError:
            raise InvalidRequest(f"{request.operation}: nested too deeply") from None
        return a.AccessReply(msgspec.json.encode(await operation(arguments)))

    async def _rule_list(self, body: Nothing) -> object:
        return [_rule_row(rule) for rule in self._administration.rules(self._caller)]

    async def _rule_add(self, body: RuleBody) -> object:
        await self._administration.add_rule(self._caller, body.rule())
        return {}

    async def _rule_remove(self, body: RuleBody) -> object:
        await self._administration.remove_rule(self._caller, body.rule())
        return {}

    async def _rule_check(self, body: CheckBody) -> object:
        allowed, why = self._administration.explain(self._caller, body.user, body.action, Resource(body.kind, body.name))
        return {"allowed": allowed, "why": why}

    async def _role_rows(self, body: Nothing) -> object:
        roles = self._access.roles_shown(self.who)
        return [
            {"name": name, "grants": [GrantRow.of(grant) for grant in role.grants], "description": role.description}
            for name, role in roles.items()
        ]

    async def _role_put(self, body: RoleBody) -> object:
        await self._administration.put_role(self._caller, body.name, [grant.grant() for grant in body.grants], body.description)
        return {}

    async def _role_delete(self, body: NameBody) -> object:
        await self._administration.delete_role(self._caller, body.name)
        return {}

    async def _key_list(self, body: Nothing) -> object:
        return self._administration.keys(self._caller)

    async def _key_get(self, body: KeyBody) -> object:
        return self._administration.key(self._caller, body.id)

    async def _key_create(self, body: NewKeyBody) -> object:
        scopes = [scope.grant() for scope in body.scopes]
        made = await self._administration.create_key(
            self._caller, body.owner, scopes, expires_ms=body.expires_ms, description=body.description
        )
        return {"id": made.id, "key": made.text}

    async def _key_alter(self, body: AlterKeyBody) -> object:
        scopes = None if body.scopes is None else [scope.grant() for scope in body.scopes]
        return await self._administration.alter_key(
            self._caller, body.id, expires_ms=body.expires_ms, description=body.description, scopes=scopes
        )

    async def _key_revoke(self, body: KeyBody) -> object:
        await self._administration.revoke_key(self._caller, body.id)
        return {}

    async def _key_delete(self, body: KeyBody) -> object:
        await self._administration.delete_key(self._caller, body.id)
        return {}

    # The audit log.

    async def _audit_query(self, request: a.AuditQuery) -> Reply:
        query = _query(request)
        found = await self._administration.audit(self._caller, query)
        return a.AuditPage([_event(noted) for noted in found.events], min(found.total, (1 << 31) - 1), found.has_more(query))

    async def _audit_export(self, request: a.AuditExport) -> Reply:
        if request.format not in ("json", "csv"):
            raise InvalidRequest(f"unknown format {request.format[:40]!r}: expected json or csv")
        found = await self._administration.audit(self._caller, _query(request.query, AUDIT_QUERY_EVENTS_MAX))
        return a.AuditFile(request.format, _as_json(found.events) if request.format == "json" else _as_csv(found.events))


def _permissions(role: Role) -> list[str]:
    return sorted({_WORDS[action] for grant in role.grants for action in grant.actions if action in _WORDS})


def _rule_row(rule: Rule) -> dict[str, object]:
    grant = GrantRow.of(rule.grant)
    return {
        "subject": rule.subject,
        "effect": rule.effect.value,
        "actions": grant.actions,
        "kind": grant.kind,
        "match": grant.match,
        "name": grant.name,
    }


def _query(request: a.AuditQuery, limit: int = _EVENTS) -> Query:
    return Query(
        start_ms=request.start * 1000,
        end_ms=request.end * 1000,
        types=frozenset(request.types),
        user=request.user,
        resource=request.resource,
        result=request.result,
        search=request.search,
        limit=min(request.limit, AUDIT_QUERY_EVENTS_MAX) if request.limit > 0 else limit,
        skip=max(request.offset, 0),
    )


def _event(noted: Noted) -> a.AuditEvent:
    event = noted.event
    details = [a.Detail("protocol", event.protocol), *(a.Detail(name, value) for name, value in sorted(event.details.items()))]
    return a.AuditEvent(
        str(noted.offset), noted.time_ms, event.type, event.user, event.address, event.resource, event.action, event.result, _NODE, details
    )


def _as_json(events: list[Noted]) -> bytes:
    return msgspec.json.encode([{"id": noted.offset, "time_ms": noted.time_ms, **msgspec.to_builtins(noted.event)} for noted in events])


def _as_csv(events: list[Noted]) -> bytes:
    """Escape cells that a spreadsheet would evaluate: the text may come from a failed login."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(["id", "time_ms", "type", "action", "user", "protocol", "address", "resource", "result", "details"])
    for noted in events:
        event = noted.event
        details = " ".join(f"{name}={value}" for name, value in sorted(event.details.items()))
        cells = [event.type, event.action, event.user, event.protocol, event.address, event.resource, event.result, details]
        writer.writerow([noted.offset, noted.time_ms, *(f"'{cell}" if cell[:1] in tuple("=+-@\t\r") and cell else cell for cell in cells)])
    return text.getvalue().encode()
