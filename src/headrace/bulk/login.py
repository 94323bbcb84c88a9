"""Who calls: a client certificate, a bearer token that a login gave out, an API key, or nobody.

    Handshake   authorization: Basic user:password   → authorization: Bearer <token>     (what `authenticate_basic_token` does)
    any call    authorization: Bearer <token>        → the user
    any call    authorization: Bearer <API key>      → the owner of the key
    any call    nothing                              → the principal of the lane

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
from hashlib import sha256
from ipaddress import ip_address
from typing import Any, Final

from pyarrow import flight

from headrace.access.access import Access
from headrace.access.administration import Caller
from headrace.access.policy import ANONYMOUS
from headrace.broker.access import Principal
from headrace.bulk.bridge import Bridge
from headrace.bulk.fault import flight_error
from headrace.bulk.lines import address_of
from headrace.errors import BrokerError, LoginFailed
from headrace.limits import BULK_TOKEN_SECONDS_MAX, BULK_TOKENS_MAX, PASSWORD_BYTES_MAX

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


class Callers:
    """Says who the caller of a call is."""

    def __init__(self, bridge: Bridge, access: Access, otherwise: str) -> None:
        self._bridge, self._access = bridge, access
        self._nobody = Principal(otherwise, DOOR)
        self.tokens = Tokens()
        self._keys = Tokens()
        """Keys that were verified a moment ago, by what cannot be turned back into them, and where they came from."""

    def who(self, context: flight.ServerCallContext) -> Principal:
        """Raises `LoginFailed` for a token or key that is not good (any more)."""
        shown: _Shown | None = context.get_middleware(MIDDLEWARE)
        if shown is None or not shown.bearer:
            return certified(context.peer_identity()) or self._nobody
        found = self.tokens.owner(shown.bearer) or self._key_owner(shown.bearer, context.peer())
        if found is None:
            raise LoginFailed
        return found

    def log_in(self, name: str, password: str) -> str:
        """A token. Raises what `Access.log_in` raises. gRPC does not say at this point where the caller is."""
        caller = Caller(Principal(ANONYMOUS, DOOR), "")
        return self.tokens.give(self._bridge.wait(lambda: self._access.log_in(name, password, caller), _LOGIN_SECONDS_MAX))

    def _key_owner(self, text: str, peer: str) -> Principal | None:
        if not self._access.is_enforced:
            return None
        address = address_of(peer)
        caller = Caller(Principal(ANONYMOUS, DOOR), "" if address is None else address[0])
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
    """What came with one call."""

    def __init__(self, bearer: str = "", given: str = "") -> None:
        self.bearer, self._given = bearer, given

    def sending_headers(self) -> dict[str, str]:
        return {"authorization": f"Bearer {self._given}"} if self._given else {}


class LoginMiddleware(flight.ServerMiddlewareFactory):  # type: ignore[misc]  # pyarrow has no types
    """Reads the header of every call; a user and a password become a token."""

    def __init__(self, callers: Callers) -> None:
        self._callers = callers

    def start_call(self, info: flight.CallInfo, headers: dict[str, list[Any]]) -> _Shown | None:
        values = next((values for name, values in headers.items() if name.lower() == "authorization"), None)
        if not values:
            return None
        text = values[0].decode("utf-8", "replace") if isinstance(values[0], bytes) else str(values[0])
        try:
            return self._shown(text)
        except BrokerError as error:
            raise flight_error(error) from None

    def _shown(self, text: str) -> _Shown:
        scheme, _, credentials = text.partition(" ")
        if len(text) > _HEADER_BYTES_MAX:
            raise LoginFailed
        if scheme.lower() == "bearer":
            return _Shown(bearer=credentials.strip())
        if scheme.lower() != "basic":
            raise LoginFailed
        try:
            name, colon, password = base64.b64decode(credentials, validate=True).decode().partition(":")
        except ValueError:  # no base64, no ASCII, no UTF-8
            raise LoginFailed from None
        if not colon:
            raise LoginFailed
        token = self._callers.log_in(name, password)
        return _Shown(bearer=token, given=token)


class OpenHandshake(flight.ServerAuthHandler):  # type: ignore[misc]  # pyarrow has no types
    """The middleware has looked at the header by then; a handshake itself proves nothing."""

    def authenticate(self, outgoing: object, incoming: object) -> None:
        pass

    def is_valid(self, token: bytes) -> bytes:
        return b""
