"""Who calls: a client certificate, a bearer token that a login gave out, an API key, or nobody.

    Handshake   authorization: Basic user:password   → authorization: Bearer <token>     (what `authenticate_basic_token` does)
    first call  authorization: Bearer <token>        → the password is verified          (and the same for a call with Basic)
    any call    authorization: Bearer <token>        → the user
    any call    authorization: Bearer <API key>      → the owner of the key
    any call    nothing                              → the principal of the lane

`pyarrow` says where a caller is only to the method that serves a call, not to a handshake. Failed logins are counted by address, so the
password is verified with the first call that shows the token: a wrong one fails there.

A token is good for an hour and only in this process. It stands for the user as of the login: a changed password or a disabled user ends it,
because every verb asks the gate. So does a key that is revoked, which is why it need not be verified, and written down as a login, with
each call of thousands.

Of a certificate gRPC only says the first alternative name, of whatever kind, or the common name if there is none. The other doors go by
URIs and DNS names: a name of another kind is refused here, because it might be somebody else's there.
"""

from __future__ import annotations

import base64
import secrets
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, Final

from pyarrow import flight

from headrace.access.access import Access
from headrace.access.administration import Caller
from headrace.access.policy import ANONYMOUS
from headrace.broker.access import Principal
from headrace.bulk.bridge import Bridge
from headrace.bulk.calls import Call, Calls
from headrace.bulk.fault import flight_error
from headrace.bulk.lines import address_of
from headrace.errors import BrokerError, LoginFailed
from headrace.limits import (
    BULK_TOKEN_SECONDS_MAX,
    BULK_TOKENS_MAX,
    FLIGHT_LOGIN_PENDING_SECONDS_MAX,
    FLIGHT_LOGINS_PENDING_MAX,
    PASSWORD_BYTES_MAX,
)

DOOR: Final = "bulk"
MIDDLEWARE: Final = "login"
_HEADER_BYTES_MAX: Final = 4 * PASSWORD_BYTES_MAX
_TOKEN_BYTES: Final = 32
_LOGIN_SECONDS_MAX: Final = 30.0
_KEY_SECONDS_MAX: Final = 60.0


class Tokens:
    """The logins that are good now. Used by many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, count_max: int = BULK_TOKENS_MAX) -> None:
        self._clock, self._count_max = clock, count_max
        self._known: OrderedDict[str, tuple[Principal, float]] = OrderedDict()
        self._lock = threading.Lock()

    def give(self, who: Principal) -> str:
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.keep(token, who, BULK_TOKEN_SECONDS_MAX)
        return token

    def keep(self, token: str, who: Principal, seconds: float) -> None:
        """One that was made elsewhere."""
        with self._lock:
            self._known[token] = who, self._clock() + seconds
            while len(self._known) > self._count_max:
                self._known.popitem(last=False)

    def owner(self, token: str) -> Principal | None:
        with self._lock:
            found = self._known.get(token)
            if found is not None and found[1] <= self._clock():
                del self._known[token]
                found = None
        return None if found is None else found[0]


class _Pending:
    """A login whose password has not been verified yet. The lock is held while it is: two calls may come at once."""

    __slots__ = ("expires", "lock", "name", "password")

    def __init__(self, name: str, password: str, expires: float) -> None:
        self.name, self.password, self.expires = name, password, expires
        self.lock = threading.Lock()


class PendingLogins:
    """Used by many threads."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, count_max: int = FLIGHT_LOGINS_PENDING_MAX) -> None:
        self._clock, self._count_max = clock, count_max
        self._by_token: OrderedDict[str, _Pending] = OrderedDict()
        self._lock = threading.Lock()

    def give(self, name: str, password: str) -> str:
        token, now = secrets.token_urlsafe(_TOKEN_BYTES), self._clock()
        with self._lock:
            self._by_token[token] = _Pending(name, password, now + FLIGHT_LOGIN_PENDING_SECONDS_MAX)
            while len(self._by_token) > self._count_max or next(iter(self._by_token.values())).expires <= now:
                self._by_token.popitem(last=False)
        return token

    def find(self, token: str) -> _Pending | None:
        with self._lock:
            found = self._by_token.get(token)
        return None if found is None or found.expires <= self._clock() else found

    def forget(self, token: str) -> None:
        with self._lock:
            self._by_token.pop(token, None)


class Callers:
    """Says who the caller of a call is."""

    def __init__(self, bridge: Bridge, access: Access, otherwise: str) -> None:
        self._bridge, self._access = bridge, access
        self._nobody = Principal(otherwise, DOOR)
        self.tokens = Tokens()
        self.pending = PendingLogins()
        self._keys = Tokens()
        """Keys that were verified a moment ago, by what cannot be turned back into them, and where they came from."""

    def who(self, context: flight.ServerCallContext) -> Principal:
        """Raises `LoginFailed` for a token or key that is not good (any more), and what `Access.log_in` raises for a new one."""
        shown: _Shown | None = context.get_middleware(MIDDLEWARE)
        peer = address_of(context.peer())
        address = "" if peer is None else peer[0]
        if shown is None or not shown.bearer:
            return replace(certified(context.peer_identity()) or self._nobody, address=address)
        found = self.tokens.owner(shown.bearer) or self._log_in(shown.bearer, address) or self._key_owner(shown.bearer, address)
        if found is None:
            raise LoginFailed
        return found

    def is_admin(self, bearer: str, *, is_opening: bool) -> bool:
        """Whether a call with this token may have a place that is kept for administrators.

        One that has only claimed to be an administrator may not hold it: its call has to be served at once, and then fails.
        """
        known = self.tokens.owner(bearer)
        if known is not None:
            return self._access.is_admin(known)
        claimed = None if is_opening else self.pending.find(bearer)
        return claimed is not None and self._access.is_admin_name(claimed.name)

    def _log_in(self, token: str, address: str) -> Principal | None:
        """Verify the password of a pending login; None if there is none. Raises what `Access.log_in` raises."""
        pending = self.pending.find(token)
        if pending is None:
            return None
        with pending.lock:
            known = self.tokens.owner(token)
            if known is not None:
                return known
            caller = Caller(Principal(ANONYMOUS, DOOR), address)
            try:
                who = self._bridge.wait(lambda: self._access.log_in(pending.name, pending.password, caller), _LOGIN_SECONDS_MAX)
            except LoginFailed:
                self.pending.forget(token)
                pending.expires = 0.0
                raise
            self.tokens.keep(token, who, BULK_TOKEN_SECONDS_MAX)
            self.pending.forget(token)
            return who

    def _key_owner(self, text: str, address: str) -> Principal | None:
        if not self._access.is_enforced:
            return None
        caller = Caller(Principal(ANONYMOUS, DOOR), address)
        mark = f"{sha256(text.encode()).hexdigest()}@{caller.address}"
        found = self._keys.owner(mark)
        if found is None:
            found = self._bridge.call(lambda: self._access.verify_key(text, caller))
            if found is not None:
                self._keys.keep(mark, found, _KEY_SECONDS_MAX)
        return found


def certified(identity: bytes) -> Principal | None:
    """Whom a certificate names; None where there is none. Raises `LoginFailed` for a name that is no URI, DNS name or common name."""
    name = identity.decode("utf-8", "replace")
    if not name:
        return None
    if not name.isprintable() or "\ufffd" in name or "@" in name.partition("://")[0] or _is_address(name):
        raise LoginFailed
    return Principal(name, DOOR)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class _Shown(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """What came with one call. `call` is how it is counted; None for a handshake, which holds nothing."""

    def __init__(self, calls: Calls, call: Call | None, bearer: str = "", given: str = "") -> None:
        self._calls, self.call = calls, call
        self.bearer, self._given = bearer, given

    def sending_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._given}"} if self._given else {}

    def call_completed(self, exception: object) -> None:
        if self.call is not None:
            self._calls.end(self.call)


class LoginMiddleware(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Reads the header of every call, and counts the call before anything else is done for it."""

    def __init__(self, callers: Callers, calls: Calls) -> None:
        self._callers, self._calls = callers, calls

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[Any]]) -> _Shown:
        values = next((values for name, values in headers.items() if name.lower() == "authorization"), None)
        try:
            bearer, given = self._credentials(values[0]) if values else ("", "")
            if info is not None and info.method == flight.FlightMethod.HANDSHAKE:
                return _Shown(self._calls, None, bearer, given)
            is_opening = info is not None and info.method in (flight.FlightMethod.DO_PUT, flight.FlightMethod.DO_EXCHANGE)
            is_admin = bool(bearer) and self._callers.is_admin(bearer, is_opening=is_opening)
            return _Shown(self._calls, self._calls.arrive(is_opening=is_opening, is_admin=is_admin), bearer, given)
        except BrokerError as error:
            raise flight_error(error) from None

    def _credentials(self, value: bytes | str) -> tuple[str, str]:
        """The token that came with the call, and the one that is given out for a user and a password."""
        text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
        scheme, _, credentials = text.partition(" ")
        if len(text) > _HEADER_BYTES_MAX:
            raise LoginFailed
        if scheme.lower() == "bearer":
            return credentials.strip(), ""
        if scheme.lower() != "basic":
            raise LoginFailed
        try:
            name, colon, password = base64.b64decode(credentials, validate=True).decode().partition(":")
        except ValueError:  # no base64, no ASCII, no UTF-8
            raise LoginFailed from None
        if not colon:
            raise LoginFailed
        token = self._callers.pending.give(name, password)
        return token, token


class OpenHandshake(flight.ServerAuthHandler):  # type: ignore[misc]  # pyarrow has no types
    """The middleware has looked at the header by then; a handshake itself proves nothing."""

    def authenticate(self, outgoing: object, incoming: object) -> None:
        pass

    def is_valid(self, token: bytes) -> bytes:
        return b""
