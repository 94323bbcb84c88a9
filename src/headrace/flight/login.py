"""Authentication of callers: a client certificate, a bearer token from a login, an API key, or none.

    Handshake   authorization: Basic user:password   → authorization: Bearer <token>     (what `authenticate_basic_token` does)
    first call  authorization: Bearer <token>        → the password is verified          (and the same for a call with Basic)
    any call    authorization: Bearer <token>        → the user
    any call    authorization: Bearer <API key>      → the owner of the key
    any call    nothing                              → the default user of the endpoint

`pyarrow` reports the address of a caller only to the method that serves a call, not to a handshake. Failed logins are counted by
address, so the password is verified with the first call that sends the token; a wrong password fails there.

A token is valid for one hour and only in this process. A changed password, a disabled user or a revoked key ends it, because the broker
authorizes every request. So a verified key need not be verified and audited again with each of thousands of calls.

gRPC reports only the first alternative name of a certificate, of any kind, or the common name if there is none. The other protocols use
URIs and DNS names. A name of another kind is rejected here: on another protocol it could be a different user.
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
from headrace.broker.authorizer import Principal
from headrace.errors import BrokerError, LoginFailed
from headrace.flight.bridge import Bridge
from headrace.flight.calls import Call, Calls
from headrace.flight.errors import flight_error
from headrace.flight.forwarding import FORWARDED
from headrace.flight.sockets import address_of
from headrace.limits import (
    FLIGHT_LOGIN_PENDING_SECONDS_MAX,
    FLIGHT_LOGINS_PENDING_MAX,
    FLIGHT_TOKEN_SECONDS_MAX,
    FLIGHT_TOKENS_MAX,
    PASSWORD_BYTES_MAX,
)

PROTOCOL: Final = "flight"
MIDDLEWARE: Final = "login"
_HEADER_BYTES_MAX: Final = 4 * PASSWORD_BYTES_MAX
_TOKEN_BYTES: Final = 32
_LOGIN_SECONDS_MAX: Final = 30.0
_KEY_SECONDS_MAX: Final = 60.0


class Tokens:
    """Valid tokens and their users. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, count_max: int = FLIGHT_TOKENS_MAX) -> None:
        self._clock, self._count_max = clock, count_max
        self._known: OrderedDict[str, tuple[Principal, float]] = OrderedDict()
        self._lock = threading.Lock()

    def give(self, who: Principal) -> str:
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.keep(token, who, FLIGHT_TOKEN_SECONDS_MAX)
        return token

    def keep(self, token: str, who: Principal, seconds: float) -> None:
        """Add a token that was created elsewhere."""
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
    """A login whose password is not verified yet. The lock serializes concurrent calls with the same token."""

    __slots__ = ("expires", "lock", "name", "password")

    def __init__(self, name: str, password: str, expires: float) -> None:
        self.name, self.password, self.expires = name, password, expires
        self.lock = threading.Lock()


class PendingLogins:
    """Pending logins by token. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic, count_max: int = FLIGHT_LOGINS_PENDING_MAX) -> None:
        self._clock, self._count_max = clock, count_max
        self._by_token: OrderedDict[str, _Pending] = OrderedDict()
        self._lock = threading.Lock()

    def give(self, name: str, password: str) -> str:
        token = secrets.token_urlsafe(_TOKEN_BYTES)
        self.keep(token, name, password, FLIGHT_LOGIN_PENDING_SECONDS_MAX)
        return token

    def keep(self, token: str, name: str, password: str, seconds: float) -> None:
        now = self._clock()
        with self._lock:
            self._by_token[token] = _Pending(name, password, now + seconds)
            while len(self._by_token) > self._count_max or next(iter(self._by_token.values())).expires <= now:
                self._by_token.popitem(last=False)

    def find(self, token: str) -> _Pending | None:
        with self._lock:
            found = self._by_token.get(token)
        return None if found is None or found.expires <= self._clock() else found

    def forget(self, token: str) -> None:
        with self._lock:
            self._by_token.pop(token, None)


class Callers:
    """Authenticator of calls."""

    def __init__(self, bridge: Bridge, access: Access, otherwise: str, keeps_passwords: Callable[[], bool] = lambda: False) -> None:
        self._keeps_passwords = keeps_passwords
        self._bridge, self._access = bridge, access
        self._default = Principal(otherwise, PROTOCOL)
        self.tokens = Tokens()
        self.pending = PendingLogins()
        self._verified = PendingLogins(count_max=FLIGHT_TOKENS_MAX)
        """Passwords of valid tokens, to log in at the coordinator. Kept only by a broker that is not the coordinator."""
        self._keys = Tokens()
        """Recently verified API keys, by their hash and the address of the caller."""

    def who(self, context: flight.ServerCallContext) -> Principal:
        """Return the user of a call. Raises `LoginFailed` for an invalid token or key, and the errors of `Access.log_in`."""
        sent: _Credentials | None = context.get_middleware(MIDDLEWARE)
        peer = address_of(context.peer())
        address = "" if peer is None else peer[0]
        if sent is None or not sent.bearer:
            return replace(certified(context.peer_identity()) or self._default, address=address)
        found = self.tokens.owner(sent.bearer) or self._log_in(sent.bearer, address) or self._key_owner(sent.bearer, address)
        if found is None:
            raise LoginFailed
        return found

    def is_admin(self, bearer: str, *, is_opening: bool) -> bool:
        """Return whether a call with this token may use the reserve for administrators.

        A pending login as an administrator may use it only for a call that is served, and fails, immediately.
        """
        known = self.tokens.owner(bearer)
        if known is not None:
            return self._access.is_admin(known)
        claimed = None if is_opening else self.pending.find(bearer)
        return claimed is not None and self._access.is_admin_name(claimed.name)

    def _log_in(self, token: str, address: str) -> Principal | None:
        """Verify the password of a pending login; None if there is none. Raises the errors of `Access.log_in`."""
        pending = self.pending.find(token)
        if pending is None:
            return None
        with pending.lock:
            known = self.tokens.owner(token)
            if known is not None:
                return known
            caller = Caller(Principal(ANONYMOUS, PROTOCOL), address)
            try:
                who = self._bridge.wait(lambda: self._access.log_in(pending.name, pending.password, caller), _LOGIN_SECONDS_MAX)
            except LoginFailed:
                self.pending.forget(token)
                pending.expires = 0.0
                raise
            self.tokens.keep(token, who, FLIGHT_TOKEN_SECONDS_MAX)
            if self._keeps_passwords():
                self._verified.keep(token, pending.name, pending.password, FLIGHT_TOKEN_SECONDS_MAX)
            self.pending.forget(token)
            return who

    def login(self, bearer: str) -> tuple[str, str] | None:
        """Return the user and the password of a token; None for an API key or no credentials."""
        found = self._verified.find(bearer)
        return None if found is None else (found.name, found.password)

    def _key_owner(self, text: str, address: str) -> Principal | None:
        if not self._access.is_enforced:
            return None
        caller = Caller(Principal(ANONYMOUS, PROTOCOL), address)
        key_id = f"{sha256(text.encode()).hexdigest()}@{caller.address}"
        found = self._keys.owner(key_id)
        if found is None:
            found = self._bridge.call(lambda: self._access.verify_key(text, caller))
            if found is not None:
                self._keys.keep(key_id, found, _KEY_SECONDS_MAX)
        return found


def certified(identity: bytes) -> Principal | None:
    """Return the user that a certificate names; None without one. Raises `LoginFailed` unless it is a URI, DNS or common name."""
    name = identity.decode("utf-8", "replace")
    if not name:
        return None
    if not name.isprintable() or "\ufffd" in name or "@" in name.partition("://")[0] or _is_address(name):
        raise LoginFailed
    return Principal(name, PROTOCOL)


def _is_address(name: str) -> bool:
    try:
        ip_address(name)
    except ValueError:
        return False
    return True


class _Credentials(flight.ServerMiddleware):  # type: ignore[misc]  # pyarrow has no types
    """Credentials of one call. `call` is its entry in `Calls`; None for a handshake."""

    def __init__(self, calls: Calls, call: Call | None, bearer: str = "", given: str = "", *, is_forwarded: bool = False) -> None:
        self._calls, self.call = calls, call
        self.bearer, self._given = bearer, given
        self.is_forwarded = is_forwarded
        """Whether another broker passes the call on."""

    def sending_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._given}"} if self._given else {}

    def call_completed(self, exception: object) -> None:
        if self.call is not None:
            self._calls.end(self.call)


class LoginMiddleware(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Reads the credentials of every call, and counts the call before any other work."""

    def __init__(self, callers: Callers, calls: Calls) -> None:
        self._callers, self._calls = callers, calls

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[Any]]) -> _Credentials:
        values = next((values for name, values in headers.items() if name.lower() == "authorization"), None)
        try:
            bearer, given = self._credentials(values[0]) if values else ("", "")
            if info is not None and info.method == flight.FlightMethod.HANDSHAKE:
                return _Credentials(self._calls, None, bearer, given)
            is_opening = info is not None and info.method in (flight.FlightMethod.DO_PUT, flight.FlightMethod.DO_EXCHANGE)
            is_admin = bool(bearer) and self._callers.is_admin(bearer, is_opening=is_opening)
            call = self._calls.arrive(is_opening=is_opening, is_admin=is_admin)
            return _Credentials(self._calls, call, bearer, given, is_forwarded=FORWARDED in map(str.lower, headers))
        except BrokerError as error:
            raise flight_error(error) from None

    def _credentials(self, value: bytes | str) -> tuple[str, str]:
        """Return the token of the call, and the token to send back for a user and a password."""
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
        except ValueError:  # not base64, ASCII or UTF-8
            raise LoginFailed from None
        if not colon:
            raise LoginFailed
        token = self._callers.pending.give(name, password)
        return token, token


class OpenHandshake(flight.ServerAuthHandler):  # type: ignore[misc]  # pyarrow has no types
    """Accepts every handshake: the middleware reads the credentials."""

    def authenticate(self, outgoing: object, incoming: object) -> None:
        pass

    def is_valid(self, token: bytes) -> bytes:
        return b""
