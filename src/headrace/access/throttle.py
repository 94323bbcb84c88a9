"""Throttling of logins after failures: per account at an address, and per address.

    (address, account)   5 failures are free   a pause of 1 s, doubled by each further failure, 30 s at most
    address              20 failures are free  the same

An attempt within a pause is rejected without checking the password, so guessing costs the attacker time and the broker nothing. An
account is never slowed down as a whole: guesses from one address do not lock out its owner at another. An account that has logged in
from an address before waits only for its own pauses, not for those of the address. An account is counted by its name whether it exists
or not, so the pause reveals nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from ipaddress import IPv6Address, ip_address, ip_network
from typing import Final, TypeAlias

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
