"""Operations that change or show users, roles, rules and keys. Nearly all require ADMIN on the broker."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

from headrace.access.audit import Audit, Found, Query, event_of
from headrace.access.directory import ADMIN, Changes, Directory, is_in_force
from headrace.access.passwords import Passwords, check_password
from headrace.access.policy import BROKER, BUILT_IN_ROLES, EVERYBODY, Effect, Grant, Match, Role, Rule, role_subject, user_subject
from headrace.access.rows import (
    GrantRow,
    KeyRow,
    NewKey,
    RoleRow,
    RuleKey,
    RuleRow,
    UserRow,
    check_grant,
    check_role_name,
    check_rule,
    check_user_name,
    digest_of,
    new_key,
    rule_key,
    rule_of,
)
from headrace.broker.authorizer import Action, Authorize, Principal, Resource
from headrace.broker.settings import Clock
from headrace.broker.topics import check_topic_name
from headrace.errors import EntryExists, InvalidRequest, LimitExceeded, LoginFailed, NoSuchEntry, NotAuthorized
from headrace.limits import API_KEYS_MAX, ROLES_MAX, RULES_MAX, SCOPES_PER_KEY_MAX, USERS_MAX

USE: Final = frozenset({Action.PUBLISH, Action.READ, Action.DESCRIBE})
"""Actions that FlyMQ's own ACLs grant."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The principal that calls, and its address."""

    who: Principal
    address: str = ""


@dataclass(frozen=True, slots=True)
class TopicAcl:
    """FlyMQ's view of the rules of one topic: who may use it, beside what roles grant."""

    topic: str
    public: bool
    users: list[str]
    roles: list[str]


@dataclass(frozen=True, slots=True)
class KeyState:
    """A key as it is listed, without its digest."""

    id: str
    owner: str
    scopes: list[GrantRow]
    created_ms: int
    expires_ms: int
    revoked_ms: int
    used_ms: int
    """Since the broker was started; 0: never."""
    in_force: bool
    description: str


class Administration:
    """`may` is checked in each method. `explain` returns the decision of the rules, enforced or not, and why."""

    def __init__(
        self,
        directory: Directory,
        passwords: Passwords,
        audit: Audit,
        may: Authorize,
        explain: Callable[[Principal, Action, Resource], tuple[bool, str]],
        clock: Clock,
        random_bytes: Callable[[int], bytes],
    ) -> None:
        self._directory, self._passwords, self._audit = directory, passwords, audit
        self._may, self._explain, self._clock, self._random_bytes = may, explain, clock, random_bytes
        self.keys_used: dict[str, int] = {}

    # Users

    def users(self, by: Caller) -> dict[str, UserRow]:
        self._check(by, "user", "list", "user:*")
        return dict(sorted(self._directory.users.items()))

    def user(self, by: Caller, name: str) -> UserRow:
        """Return a user. Every user may see its own entry."""
        if name != by.who.name:
            self._check(by, "user", "describe", f"user:{name}")
        return self._user(name)

    async def create_user(self, by: Caller, name: str, password: str, roles: Sequence[str], *, enabled: bool = True) -> UserRow:
        """Create a user. With an empty password it authenticates by certificate or key only. Raises `EntryExists`."""
        self._check(by, "user", "create", f"user:{name}")
        check_user_name(name)
        self._check_roles(roles)
        if self._directory.user(name) is not None:
            raise EntryExists("user", name)
        hash = await self._passwords.hash(password) if password else ""
        async with self._directory.changing():
            users = self._directory.users
            if name in users:
                raise EntryExists("user", name)
            if len(users) >= USERS_MAX:
                raise LimitExceeded(f"there are {USERS_MAX} users already")
            now = self._clock()
            # No earlier user of this name can have had this generation: old logins must not become valid again.
            row = UserRow(sorted(set(roles)), enabled, hash, now, now, now)
            event = event_of(by.who, by.address, "user", "create", f"user:{name}", "success", roles=",".join(row.roles))
            await self._directory.commit(Changes(users={name: row}), event)
        return row

    async def update_user(self, by: Caller, name: str, roles: Sequence[str], *, enabled: bool) -> UserRow:
        """Replace the roles and the enabled flag. Raises `NoSuchEntry`."""
        self._check(by, "user", "alter", f"user:{name}")
        self._check_roles(roles)
        async with self._directory.changing():
            before = self._user(name)
            row = replace(before, roles=sorted(set(roles)), enabled=enabled, updated_ms=self._clock())
            if not enabled or ADMIN not in roles:
                self._check_not_last_admin(name)
            details = {"roles": ",".join(row.roles), "enabled": str(enabled).lower()}
            event = event_of(by.who, by.address, "user", "alter", f"user:{name}", "success", **details)
            await self._directory.commit(Changes(users={name: row}), event)
        return row

    async def delete_user(self, by: Caller, name: str) -> None:
        """Delete a user, its keys and the rules about it."""
        self._check(by, "user", "delete", f"user:{name}")
        if name == by.who.name:
            raise InvalidRequest("cannot delete your own account")
        async with self._directory.changing():
            self._user(name)
            self._check_not_last_admin(name)
            changes = Changes(users={name: None})
            changes.keys.update({id: None for id, key in self._directory.keys.items() if key.owner == name})
            changes.rules.update({key: None for key in self._directory.rules if key[0] == user_subject(name)})
            await self._directory.commit(changes, event_of(by.who, by.address, "user", "delete", f"user:{name}", "success"))

    async def change_password(self, by: Caller, name: str, new: str, old: str) -> None:
        """Change a password: users their own, with the old one; administrators anyone's. Logins with the old password end."""
        own = name == by.who.name and bool(by.who.credential)
        if not own or not old:
            self._check(by, "user", "password", f"user:{name}")
        check_password(new)
        before = self._user(name)
        if own and old and not await self._passwords.verify(before.hash, old):
            self._audit.note(event_of(by.who, by.address, "user", "password", f"user:{name}", "failure"))
            raise LoginFailed
        hash = await self._passwords.hash(new)
        async with self._directory.changing():
            row, now = self._user(name), self._clock()
            row = replace(row, hash=hash, generation=max(now, row.generation + 1), updated_ms=now)
            event = event_of(by.who, by.address, "user", "password", f"user:{name}", "success")
            await self._directory.commit(Changes(users={name: row}), event)

    # Roles

    def roles(self) -> dict[str, Role]:
        """Return all roles. `Access.roles_shown` filters them for callers that are not administrators."""
        return dict(sorted(self._directory.roles.items()))

    async def put_role(self, by: Caller, name: str, grants: Sequence[Grant], description: str) -> None:
        """Create a role or replace its grants."""
        self._check(by, "role", "alter", f"role:{name}")
        check_role_name(name)
        if name in BUILT_IN_ROLES:
            raise InvalidRequest(f"role {name!r} is built in")
        if len(grants) > SCOPES_PER_KEY_MAX:
            raise LimitExceeded(f"a role has at most {SCOPES_PER_KEY_MAX} grants")
        for grant in grants:
            check_grant(grant)
        async with self._directory.changing():
            if name not in self._directory.roles and len(self._directory.roles) >= ROLES_MAX:
                raise LimitExceeded(f"there are {ROLES_MAX} roles already")
            row = RoleRow([GrantRow.of(grant) for grant in grants], description[:500])
            event = event_of(by.who, by.address, "role", "alter", f"role:{name}", "success")
            await self._directory.commit(Changes(roles={name: row}), event)

    async def delete_role(self, by: Caller, name: str) -> None:
        """Delete a role and the rules about it. Users that have it lose its grants."""
        self._check(by, "role", "delete", f"role:{name}")
        if name in BUILT_IN_ROLES:
            raise InvalidRequest(f"role {name!r} is built in")
        async with self._directory.changing():
            if name not in self._directory.roles:
                raise NoSuchEntry("role", name)
            changes = Changes(roles={name: None})
            changes.rules.update({key: None for key in self._directory.rules if key[0] == role_subject(name)})
            for user, row in self._directory.users.items():
                if name in row.roles:
                    changes.users[user] = replace(row, roles=[role for role in row.roles if role != name])
            await self._directory.commit(changes, event_of(by.who, by.address, "role", "delete", f"role:{name}", "success"))

    # Rules

    def rules(self, by: Caller) -> list[Rule]:
        self._check(by, "acl", "list", "acl:*")
        return [rule_of(key, row) for key, row in sorted(self._directory.rules.items())]

    async def add_rule(self, by: Caller, rule: Rule) -> None:
        """Add a rule. Its actions are added to an existing rule of the same subject, effect and resource."""
        self._check(by, "acl", "create", _shown(rule))
        check_rule(rule)
        async with self._directory.changing():
            key = rule_key(rule)
            before = self._directory.rules.get(key)
            if before is None and len(self._directory.rules) >= RULES_MAX:
                raise LimitExceeded(f"there are {RULES_MAX} rules already")
            actions = {action.value for action in rule.grant.actions} | set(before.actions if before else ())
            await self._commit_rules(by, {key: RuleRow(sorted(actions))}, "create", _shown(rule))

    async def remove_rule(self, by: Caller, rule: Rule) -> None:
        """Remove actions from a rule. Raises `NoSuchEntry` if the rule has none of them."""
        self._check(by, "acl", "delete", _shown(rule))
        async with self._directory.changing():
            key = rule_key(rule)
            before = self._directory.rules.get(key)
            gone = {action.value for action in rule.grant.actions}
            if before is None or gone.isdisjoint(before.actions):
                raise NoSuchEntry("rule", _shown(rule))
            left = [action for action in before.actions if action not in gone]
            await self._commit_rules(by, {key: RuleRow(left) if left else None}, "delete", _shown(rule))

    def explain(self, by: Caller, name: str, action: Action, resource: Resource) -> tuple[bool, str]:
        """Return whether a user (or a client without a login) would be allowed this, and why."""
        if name != by.who.name:
            self._check(by, "acl", "check", str(resource))
        return self._explain(Principal(name), action, resource)

    # FlyMQ's view of the rules: those that grant a topic to users, roles or everybody

    def topic_acl(self, by: Caller, topic: str) -> TopicAcl | None:
        self._check(by, "acl", "describe", f"topic:{topic}")
        return self._topic_acls().get(topic)

    def topic_acls(self, by: Caller) -> list[TopicAcl]:
        self._check(by, "acl", "list", "topic:*")
        return [acl for _, acl in sorted(self._topic_acls().items())]

    async def set_topic_acl(self, by: Caller, acl: TopicAcl) -> None:
        """Replace the ACL of the topic; other rules stay."""
        self._check(by, "acl", "alter", f"topic:{acl.topic}")
        check_topic_name(acl.topic)
        subjects = [*map(user_subject, acl.users), *map(role_subject, acl.roles), *([EVERYBODY] if acl.public else [])]
        wanted = {rule_key(rule) for rule in (_use_of(acl.topic, subject) for subject in subjects)}
        for subject in subjects:
            check_rule(_use_of(acl.topic, subject))
        async with self._directory.changing():
            rules: dict[RuleKey, RuleRow | None] = dict.fromkeys(self._uses_of(acl.topic))
            rules.update({key: RuleRow(sorted(USE)) for key in wanted})
            if len(self._directory.rules) + len(wanted) > RULES_MAX:
                raise LimitExceeded(f"there would be more than {RULES_MAX} rules")
            await self._commit_rules(by, rules, "alter", f"topic:{acl.topic}")

    async def delete_topic_acl(self, by: Caller, topic: str) -> None:
        self._check(by, "acl", "delete", f"topic:{topic}")
        async with self._directory.changing():
            found = self._uses_of(topic)
            if not found:
                raise NoSuchEntry("ACL", topic)
            await self._commit_rules(by, dict.fromkeys(found), "delete", f"topic:{topic}")

    def _uses_of(self, topic: str) -> list[RuleKey]:
        return [key for key in self._directory.rules if key[1:] == (Effect.ALLOW.value, "topic", Match.LITERAL.value, topic)]

    def _topic_acls(self) -> dict[str, TopicAcl]:
        found: dict[str, TopicAcl] = {}
        for subject, effect, kind, match, name in sorted(self._directory.rules):
            if (effect, kind, match) != (Effect.ALLOW.value, "topic", Match.LITERAL.value):
                continue
            acl = found.setdefault(name, TopicAcl(name, False, [], []))
            if subject == EVERYBODY:
                found[name] = replace(acl, public=True)
            else:
                of, _, whom = subject.partition(":")
                (acl.users if of == "user" else acl.roles).append(whom)
        return found

    # Keys

    def keys(self, by: Caller) -> list[KeyState]:
        self._check(by, "key", "list", "key:*")
        return [self._state(id, row) for id, row in sorted(self._directory.keys.items(), key=lambda item: item[1].created_ms)]

    def key(self, by: Caller, id: str) -> KeyState:
        self._check(by, "key", "describe", f"key:{id}")
        return self._state(id, self._key(id))

    async def create_key(self, by: Caller, owner: str, scopes: Sequence[Grant], *, expires_ms: int = 0, description: str = "") -> NewKey:
        """Create a key. The key text is returned here and stored nowhere."""
        self._check(by, "key", "create", f"user:{owner}")
        self._check_scopes(scopes)
        self._check_expiry(expires_ms)
        async with self._directory.changing():
            self._user(owner)
            keys = self._directory.keys
            if len(keys) >= API_KEYS_MAX:
                raise LimitExceeded(f"there are {API_KEYS_MAX} keys already")
            made = new_key(self._random_bytes)
            while made.id in keys:
                made = new_key(self._random_bytes)
            rows = [GrantRow.of(scope) for scope in scopes]
            row = KeyRow(owner, digest_of(made.text), rows, self._clock(), expires_ms, 0, description[:500])
            event = event_of(by.who, by.address, "key", "create", f"key:{made.id}", "success", owner=owner)
            await self._directory.commit(Changes(keys={made.id: row}), event)
        return made

    async def alter_key(
        self, by: Caller, id: str, *, expires_ms: int | None, description: str | None, scopes: Sequence[Grant] | None = None
    ) -> KeyState:
        """Change a key. None keeps a value; an empty list of scopes means everything its owner may do. A revoked key stays revoked."""
        self._check(by, "key", "alter", f"key:{id}")
        self._check_scopes(scopes or ())
        if expires_ms is not None:
            self._check_expiry(expires_ms)
        async with self._directory.changing():
            row = self._key(id)
            if expires_ms is not None:
                row = replace(row, expires_ms=expires_ms)
            if description is not None:
                row = replace(row, description=description[:500])
            if scopes is not None:
                row = replace(row, scopes=[GrantRow.of(scope) for scope in scopes])
            await self._directory.commit(Changes(keys={id: row}), event_of(by.who, by.address, "key", "alter", f"key:{id}", "success"))
        return self._state(id, row)

    async def revoke_key(self, by: Caller, id: str) -> None:
        """Revoke a key permanently, open connections included. The row stays as a record."""
        self._check(by, "key", "revoke", f"key:{id}")
        async with self._directory.changing():
            row = self._key(id)
            row = replace(row, revoked_ms=row.revoked_ms or self._clock())
            await self._directory.commit(Changes(keys={id: row}), event_of(by.who, by.address, "key", "revoke", f"key:{id}", "success"))

    async def delete_key(self, by: Caller, id: str) -> None:
        self._check(by, "key", "delete", f"key:{id}")
        async with self._directory.changing():
            self._key(id)
            await self._directory.commit(Changes(keys={id: None}), event_of(by.who, by.address, "key", "delete", f"key:{id}", "success"))
        self.keys_used.pop(id, None)

    # The audit log

    async def audit(self, by: Caller, query: Query) -> Found:
        self._check(by, "audit", "read", "audit")
        return await self._audit.find(query)

    # Internals

    def _check(self, by: Caller, type: str, action: str, resource: str) -> None:
        if not self._may(by.who, Action.ADMIN, BROKER):
            self._audit.note(event_of(by.who, by.address, type, action, resource[:300], "denied"))
            raise NotAuthorized(principal=by.who.name, action=Action.ADMIN.value, resource=str(BROKER))

    def _check_roles(self, roles: Sequence[str]) -> None:
        for role in roles:
            if role not in self._directory.roles:
                raise NoSuchEntry("role", role)

    def _check_not_last_admin(self, name: str) -> None:
        if self._directory.admins() == {name}:
            raise InvalidRequest(f"{name!r} is the last user who can administer the broker")

    def _check_scopes(self, scopes: Sequence[Grant]) -> None:
        if len(scopes) > SCOPES_PER_KEY_MAX:
            raise LimitExceeded(f"a key has at most {SCOPES_PER_KEY_MAX} scopes")
        for scope in scopes:
            check_grant(scope)

    def _check_expiry(self, expires_ms: int) -> None:
        if expires_ms and expires_ms <= self._clock():
            raise InvalidRequest("the key would have expired already")

    def _user(self, name: str) -> UserRow:
        row = self._directory.user(name)
        if row is None:
            raise NoSuchEntry("user", name)
        return row

    def _key(self, id: str) -> KeyRow:
        row = self._directory.key(id)
        if row is None:
            raise NoSuchEntry("key", id)
        return row

    def _state(self, id: str, row: KeyRow) -> KeyState:
        return KeyState(
            id,
            row.owner,
            row.scopes,
            row.created_ms,
            row.expires_ms,
            row.revoked_ms,
            self.keys_used.get(id, 0),
            is_in_force(row, self._clock()),
            row.description,
        )

    async def _commit_rules(self, by: Caller, rules: dict[RuleKey, RuleRow | None], action: str, shown: str) -> None:
        await self._directory.commit(Changes(rules=rules), event_of(by.who, by.address, "acl", action, shown, "success"))


def _use_of(topic: str, subject: str) -> Rule:
    return Rule(subject, Effect.ALLOW, Grant(USE, "topic", Match.LITERAL, topic))


def _shown(rule: Rule) -> str:
    grant = rule.grant
    star = "*" if grant.match is Match.PREFIX else ""
    actions = ",".join(sorted(action.value for action in grant.actions))
    return f"{rule.effect} {rule.subject[:260]} {actions} {grant.kind}:{grant.name[:260]}{star}"
