"""Authentication and authorization of a broker.

    login or key ─► Principal ─► Authorizer ─► authorize ─► decide(policy)
    create_user, put_rule, … ─► tables ─► a new policy ─► the broker checks again, open cursors included

A method that administers takes the `Caller`. It raises an error for callers without the permission and writes an audit event either way.

Throttling of logins after failures: per account at an address, and per address.

    (address, account)   5 failures are free   a pause of 1 s, doubled by each further failure, 30 s at most
    address              20 failures are free  the same

An attempt within a pause is rejected without checking the password, so guessing costs the attacker time and the broker nothing. An
account is never slowed down as a whole: guesses from one address do not lock out its owner at another. An account that has logged in
from an address before waits only for its own pauses, not for those of the address. An account is counted by its name whether it exists
or not, so the pause reveals nothing.
"""

from __future__ import annotations

import asyncio
import base64
import logging
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final, TypeAlias

from headrace.access.administration import Administration, Caller
from headrace.access.audit import Audit, Event, event_of
from headrace.access.directory import ADMIN, Changes, Directory
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
    explain,
    key_credential,
    password_credential,
    role_subject,
    roles_held,
    user_subject,
)
from headrace.access.rows import UserRow, check_user_name, fits, id_of
from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.settings import Clock, Later, Timer
from headrace.broker.tables import TableFollower
from headrace.engine.contract import Engine
from headrace.errors import BrokerError, LoginFailed, LoginThrottled, Unavailable
from headrace.limits import LOGIN_PAUSE_MS_MAX, LOGINS_REMEMBERED_MAX

_PAUSE_MS: Final = 1_000
_IPV6_PREFIX_BITS: Final = 64
"""One customer of a provider has all the IPv6 addresses of such a prefix."""

_ACCOUNT_CHARACTERS_MAX: Final = 256
"""Maximum length of a remembered name. No account has a longer one, and a peer chooses what it sends."""
_Pair: TypeAlias = tuple[str, str]


def plain_address(host: str) -> str:
    """Return one text for each IP address, without brackets and zone; an IPv4 address in IPv6 form becomes the IPv4 address. Text that is
    not an IP address is returned unchanged."""
    try:
        found = ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return host
    return str(getattr(found, "ipv4_mapped", None) or found)


def _source(host: str) -> str:
    """Return the key under which failures of this host are counted: an IPv4 address, or an IPv6 prefix."""
    plain = plain_address(host)
    try:
        found = ip_address(plain)
    except ValueError:
        return plain
    return str(ip_network((found, _IPV6_PREFIX_BITS), strict=False)) if isinstance(found, IPv6Address) else plain


@dataclass(slots=True)
class _Score:
    failures: int
    until_ms: int
    seen_ms: int


class _Tally:
    """Failures by name. When there are too many names, the one idle longest is forgotten."""

    def __init__(self, free: int, names_max: int) -> None:
        self._free, self._names_max = free, names_max
        self._scores: OrderedDict[object, _Score] = OrderedDict()

    def pause_ms(self, name: object, now: int) -> int:
        score = self._scores.get(name)
        if score is None or now < score.seen_ms:  # a clock that went back must not lengthen a pause
            return 0
        return min(max(0, score.until_ms - now), LOGIN_PAUSE_MS_MAX)

    def failed(self, name: object, now: int) -> None:
        score = self._scores.pop(name, None)
        # Counting starts again half an hour after the last pause.
        failures = 1 if score is None or now - score.seen_ms > 60 * LOGIN_PAUSE_MS_MAX else score.failures + 1
        beyond = failures - self._free
        pause = min(_PAUSE_MS << min(beyond - 1, 16), LOGIN_PAUSE_MS_MAX) if beyond > 0 else 0
        self._scores[name] = _Score(failures, now + pause, now)
        if len(self._scores) > self._names_max:
            self._scores.popitem(last=False)

    def clear(self, name: object) -> None:
        self._scores.pop(name, None)

    def lower(self, name: object, count: int = 1, *, ends_pause: bool = False) -> None:
        """Subtract failures. The pause ends if few enough are left, or if `ends_pause` is set."""
        score = self._scores.get(name)
        if score is not None:
            score.failures -= count
            if ends_pause or score.failures <= self._free:
                score.until_ms = 0
            if score.failures <= 0:
                del self._scores[name]


def _pair(source: str, account: str) -> _Pair:
    return source, account[:_ACCOUNT_CHARACTERS_MAX]


class Throttle:
    """Time is an argument: ms of a monotonic clock. An account of None is an attempt without a name (an unreadable key), an address
    of "" one without an address (a caller in the process), counted for its account only."""

    def __init__(self, *, account_free: int = 5, address_free: int = 20, names_max: int = LOGINS_REMEMBERED_MAX) -> None:
        """So many failures in a row are free: the next attempt is also checked at once."""
        self._accounts = _Tally(account_free, names_max)
        self._addresses = _Tally(address_free, names_max)
        self._names_max = names_max
        self._known: OrderedDict[_Pair, None] = OrderedDict()
        """Accounts that have logged in from an address."""

    def pause_ms(self, account: str | None, address: str, now: int) -> int:
        """Return how long this attempt must wait; 0: it may be made."""
        source = _source(address)
        own = 0 if account is None else self._accounts.pause_ms(_pair(source, account), now)
        if not source or (account is not None and _pair(source, account) in self._known):
            return own
        return max(own, self._addresses.pause_ms(source, now))

    def begin(self, account: str | None, address: str, now: int) -> None:
        """Count the attempt as failed until it succeeds: a hundred at once are a hundred attempts, not one."""
        source = _source(address)
        if source:
            self._addresses.failed(source, now)
        if account is not None:
            self._accounts.failed(_pair(source, account), now)

    def unseen(self, account: str, address: str) -> None:
        """Take back an attempt that was never checked."""
        source = _source(address)
        self._addresses.lower(source)
        self._accounts.lower(_pair(source, account))

    def succeeded(self, account: str | None, address: str) -> None:
        """Clear the failures of the account at this address. Its first login from an address also takes one failure from the address
        and ends its pause. Later logins only take back their own attempt: otherwise the owner of one account could guess others
        without pauses."""
        source = _source(address)
        if account is None:
            self._addresses.lower(source)
            return
        pair = _pair(source, account)
        self._accounts.clear(pair)
        is_new = pair not in self._known
        self._addresses.lower(source, 2 if is_new else 1, ends_pause=is_new)
        self._known[pair] = None
        self._known.move_to_end(pair)
        if len(self._known) > self._names_max:
            self._known.popitem(last=False)


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
        self._engine = engine
        self._directory = Directory(engine, self._audit, self._changed)
        self._following = TableFollower(engine, self._directory.tables, self._changed)
        self._passwords = passwords if passwords is not None else Passwords(random_bytes)
        self._throttle = Throttle()
        self._policy = Policy()
        self._listeners: list[Callable[[], None]] = []
        self._timer: Timer | None = None
        self.administration = Administration(
            self._directory, self._passwords, self._audit, self.authorize, self._explain, clock, random_bytes
        )
        self._is_loaded = self._is_closed = False

    # Lifecycle

    async def open(self, admin_password: str | None = None) -> str | None:
        """Load the tables. If access is enforced and no user could administer the broker, create the user `admin` with this password
        or a new one. A new password is returned and must be shown once.

        If another process owns the tables, follow them. Call it again when this one has become the owner."""
        await self._following.stop()
        await self._directory.load()
        self._is_loaded = True
        self._changed()
        if not self._engine.ownership.is_owner:
            self._following.start()
            return None
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
        await self._following.stop()
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

    def _explain(self, who: Principal, action: Action, resource: Resource) -> tuple[bool, str]:
        return explain(self._policy, who, action, resource)

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
