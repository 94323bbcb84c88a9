"""Authentication and authorization of a broker.

    login or key ─► Principal ─► Authorizer ─► authorize ─► decide(policy)
    create_user, put_rule, … ─► tables ─► a new policy ─► the broker checks again, open cursors included

A method that administers takes the `Caller`. It raises an error for callers without the permission and writes an audit event either way.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from headrace.access.administration import Administration, Caller
from headrace.access.audit import Audit, Event, event_of
from headrace.access.directory import ADMIN, Changes, Directory
from headrace.access.keys import fits, id_of
from headrace.access.naming import check_user_name
from headrace.access.passwords import Passwords
from headrace.access.policy import (
    ANONYMOUS,
    BROKER,
    BUILT_IN_ROLES,
    EVERYBODY,
    Effect,
    Policy,
    Role,
    decide,
    key_credential,
    password_credential,
    role_subject,
    roles_held,
    user_subject,
)
from headrace.access.rows import UserRow
from headrace.access.throttle import Throttle, plain_address
from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.timers import Clock, Later, Timer
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, LoginFailed, LoginThrottled, Unavailable

_log = logging.getLogger(__name__)
_PASSWORD_BYTES: Final = 18
_TIMER_SECONDS_MAX: Final = 24 * 3600.0


class Mode(StrEnum):
    """Enforcement of the access rules."""

    OPEN = "open"
    ENFORCED = "enforced"


@dataclass(frozen=True, slots=True)
class AccessSettings:
    """Settings that an operator chooses."""

    mode: Mode = Mode.OPEN
    audit_retention_ms: int = 90 * 24 * 3600 * 1000


class Access:
    """Opened after the broker's engine and closed before it. `random_bytes` creates salts, keys and the first password. `ticks`
    returns the milliseconds of a monotonic clock, for the pauses after failed logins; without it they use `clock`."""

    def __init__(
        self,
        engine: Engine,
        *,
        clock: Clock,
        random_bytes: Callable[[int], bytes],
        settings: AccessSettings = AccessSettings(),
        later: Later | None = None,
        passwords: Passwords | None = None,
        ticks: Clock | None = None,
    ) -> None:
        self.settings = settings
        self._ticks = clock if ticks is None else ticks
        self._clock, self._random_bytes = clock, random_bytes
        self._later = later
        self._audit = Audit(engine, clock, retention_ms=settings.audit_retention_ms)
        self._directory = Directory(engine, self._audit, self._changed)
        self._passwords = passwords if passwords is not None else Passwords(random_bytes)
        self._throttle = Throttle()
        self._policy = Policy()
        self._listeners: list[Callable[[], None]] = []
        self._timer: Timer | None = None
        self.administration = Administration(
            self._directory, self._passwords, self._audit, self.authorize, self._would, clock, random_bytes
        )
        self._is_loaded = self._is_closed = False

    # Lifecycle

    async def open(self, admin_password: str | None = None) -> str | None:
        """Load the tables. If access is enforced and no user could administer the broker, create the user `admin` with this password
        or a new one. A new password is returned and must be shown once."""
        await self._directory.load()
        self._is_loaded = True
        self._changed()
        if not self.is_enforced or self._directory.admins():
            return None
        made = None
        if admin_password is None:
            made = admin_password = base64.urlsafe_b64encode(self._random_bytes(_PASSWORD_BYTES)).decode()
        hash = await self._passwords.hash(admin_password)
        async with self._directory.changing():
            before = self._directory.user(ADMIN)
            now = self._clock()
            generation = 1 if before is None else before.generation + 1
            row = UserRow([ADMIN], True, hash, generation, now if before is None else before.created_ms, now)
            event = Event("user", "create", "headrace", "internal", "", f"user:{ADMIN}", "success", {"roles": ADMIN})
            await self._directory.commit(Changes(users={ADMIN: row}), event)
        return made

    async def close(self) -> None:
        self._is_closed = True
        if self._timer is not None:
            self._timer.cancel()
        self._passwords.close()
        await self._audit.drain()

    @property
    def is_enforced(self) -> bool:
        return self.settings.mode is Mode.ENFORCED

    @property
    def policy(self) -> Policy:
        """The policy in force."""
        return self._policy

    def listen(self, changed: Callable[[], None]) -> None:
        """Call `changed` whenever answers of `authorize` may have changed."""
        self._listeners.append(changed)

    def _changed(self) -> None:
        now = self._clock()
        self._policy = self._directory.policy(now)
        for changed in self._listeners:
            changed()
        self._wake_at_expiry(now)

    def _wake_at_expiry(self, now: int) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        expiry = self._directory.next_expiry(now)
        if expiry is not None and not self._is_closed:
            later = self._later or asyncio.get_running_loop().call_later
            self._timer = later(min((expiry - now) / 1000, _TIMER_SECONDS_MAX), self._changed)

    # Called by the authorizer

    def authorize(self, who: Principal, action: Action, resource: Resource) -> bool:
        """Decide a request. Raises `Unavailable` before the rules are loaded: a denial without looking would be wrong."""
        if not self.is_enforced:
            return True
        if not self._is_loaded:
            raise Unavailable("the rules have not been read yet")
        return decide(self._policy, who, action, resource)

    def _would(self, who: Principal, action: Action, resource: Resource) -> bool:
        return decide(self._policy, who, action, resource)

    def record_decision(self, who: Principal, action: Action, kind: str, name: str, allowed: bool) -> None:
        """Audit a decision: every change of a topic or group, and each denial once."""
        type = kind if allowed else "denial"
        self._audit.note(event_of(who, who.address, type, action.value, f"{kind}:{name}", "allowed" if allowed else "denied"))

    # Authentication

    async def log_in(self, name: str, password: str, caller: Caller) -> Principal:
        """Return the principal of a user. Raises `LoginFailed`, `LoginThrottled`, and `Unavailable` when too many logins are waiting."""
        protocol, now, caller = caller.who.protocol, self._ticks(), _from_plain_address(caller)
        if not self.is_enforced:
            check_user_name(name)
            return Principal(name, protocol, address=caller.address)
        pause = self._throttle.pause_ms(name, caller.address, now)
        if pause:
            raise LoginThrottled(wait_ms=pause)
        self._throttle.begin(name, caller.address, now)
        row = self._directory.user(name)
        try:
            fits = await self._passwords.verify(row.hash if row is not None else "", password)
        except Unavailable:
            self._throttle.unseen(name, caller.address)
            raise
        claimed = Principal(name[:249], protocol)
        if row is None or not fits or not row.enabled or self._directory.user(name) != row:
            self._audit.note(event_of(claimed, caller.address, "login", "login", f"user:{claimed.name}", "failure"))
            raise LoginFailed
        self._throttle.succeeded(name, caller.address)
        self._audit.note(event_of(claimed, caller.address, "login", "login", f"user:{name}", "success"))
        if self._passwords.is_outdated(row.hash):
            await self._rehash(name, row, password)
        return Principal(name, protocol, password_credential(row.generation), caller.address)

    async def _rehash(self, name: str, row: UserRow, password: str) -> None:
        """Store the same password with the current parameters. Existing logins stay valid."""
        try:
            hash = await self._passwords.hash(password)
            async with self._directory.changing():
                if self._directory.user(name) == row:
                    event = Event("user", "rehash", name, "internal", "", f"user:{name}", "success")
                    await self._directory.commit(Changes(users={name: replace(row, hash=hash)}), event)
        except BrokerError as failure:
            _log.warning("password not rehashed", extra={"reason": str(failure)})

    def verify_key(self, text: str, caller: Caller) -> Principal | None:
        """Return the owner of an API key as a principal; None if the key is unknown or not in force."""
        now, caller, id = self._ticks(), _from_plain_address(caller), id_of(text)
        account = f"key:{id}" if id else None
        if self._throttle.pause_ms(account, caller.address, now):
            return None
        self._throttle.begin(account, caller.address, now)
        row = self._directory.key(id) if id else None
        if not fits(None if row is None else row.digest, text) or row is None or id not in self._policy.keys:
            anonymous = Principal(ANONYMOUS, caller.who.protocol)
            self._audit.note(event_of(anonymous, caller.address, "login", "login", f"key:{id}", "failure"))
            return None
        self._throttle.succeeded(account, caller.address)
        self.administration.keys_used[id] = self._clock()
        who = Principal(row.owner, caller.who.protocol, key_credential(id), caller.address)
        self._audit.note(event_of(who, caller.address, "login", "login", f"key:{id}", "success"))
        return who

    def roles_shown(self, who: Principal) -> dict[str, Role]:
        """Return the built-in roles and the caller's own; all roles to administrators. Others are hidden, because the grants of a
        role name topics and groups."""
        roles = self.administration.roles()
        if self.authorize(who, Action.ADMIN, BROKER):
            return roles
        shown = BUILT_IN_ROLES.keys() | roles_held(self._policy, who)
        return {name: role for name, role in roles.items() if name in shown}

    def is_admin(self, who: Principal) -> bool:
        """Return whether access is enforced and this principal administers the broker."""
        return self.is_enforced and decide(self._policy, who, Action.ADMIN, BROKER)

    def is_admin_name(self, name: str) -> bool:
        """Return whether a user of this name, once logged in, would administer the broker."""
        return name in self._policy.users and self.is_admin(Principal(name))

    def allows_anything(self, name: str) -> bool:
        """Return whether a user of this name is allowed anything at all."""
        policy = self._policy
        user = policy.users.get(name)
        if not self.is_enforced or (user is not None and not user.enabled):
            return not self.is_enforced
        roles = user.roles if user is not None else frozenset[str]()
        subjects = (EVERYBODY, user_subject(name), *map(role_subject, roles))
        if any(rule.effect is Effect.ALLOW for subject in subjects for rule in policy.rules_of(subject)):
            return True
        return any(policy.roles[role].grants for role in roles if role in policy.roles)

    def roles_of(self, who: Principal) -> list[str]:
        user = self._policy.users.get(who.name)
        return sorted(user.roles) if user is not None else []


def _from_plain_address(caller: Caller) -> Caller:
    """Normalize the address, which each protocol writes differently: one address must be one source of failures and one text in the
    audit log."""
    return replace(caller, address=plain_address(caller.address))
