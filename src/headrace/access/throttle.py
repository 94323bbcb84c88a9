"""Attempts to log in, slowed down: per account and per address, each failure beyond a few doubles the pause before the next attempt.

An attempt within the pause is refused without looking at the password, so guessing costs the guesser time and the broker nothing.
An account is throttled by its name whether it exists or not: the pause tells nothing.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Final

from headrace.limits import LOGIN_PAUSE_MS_MAX, LOGINS_REMEMBERED_MAX

_PAUSE_MS: Final = 1_000


@dataclass(slots=True)
class _Score:
    failures: int
    until_ms: int
    seen_ms: int


class _Tally:
    """Failures by name. The name that was quiet for longest is forgotten when there are too many."""

    def __init__(self, free: int, names_max: int) -> None:
        self._free, self._names_max = free, names_max
        self._scores: OrderedDict[str, _Score] = OrderedDict()

    def pause_ms(self, name: str, now: int) -> int:
        score = self._scores.get(name)
        return 0 if score is None else max(0, score.until_ms - now)

    def failed(self, name: str, now: int) -> None:
        score = self._scores.pop(name, None)
        # Half an hour of quiet after the last pause, and the counting begins anew.
        failures = 1 if score is None or now - score.seen_ms > 60 * LOGIN_PAUSE_MS_MAX else score.failures + 1
        beyond = failures - self._free
        pause = min(_PAUSE_MS << min(beyond - 1, 16), LOGIN_PAUSE_MS_MAX) if beyond > 0 else 0
        self._scores[name] = _Score(failures, now + pause, now)
        if len(self._scores) > self._names_max:
            self._scores.popitem(last=False)

    def clear(self, name: str) -> None:
        self._scores.pop(name, None)

    def forgive(self, name: str) -> None:
        """One failure less, and no pause because of it."""
        score = self._scores.get(name)
        if score is not None:
            score.failures -= 1
            if score.failures <= self._free:
                score.until_ms = 0
            if score.failures <= 0:
                del self._scores[name]


class Throttle:
    """Time is an argument, Unix ms or any other that goes forward. An account of None is an attempt that names none (an API key), an
    address of "" one that the door cannot tell: only the account is counted then, or all who come through that door would wait together."""

    def __init__(self, *, account_free: int = 5, address_free: int = 20, names_max: int = LOGINS_REMEMBERED_MAX) -> None:
        """So many failures in a row are free: the next one, however soon, is looked at as well."""
        self._accounts = _Tally(account_free, names_max)
        self._addresses = _Tally(address_free, names_max)

    def pause_ms(self, account: str | None, address: str, now: int) -> int:
        """How long this attempt has to wait; 0: it may be made."""
        pause = self._addresses.pause_ms(address, now) if address else 0
        return pause if account is None else max(pause, self._accounts.pause_ms(account, now))

    def begin(self, account: str | None, address: str, now: int) -> None:
        """An attempt counts as failed until it has succeeded: a hundred at once are a hundred attempts, not one."""
        if address:
            self._addresses.failed(address, now)
        if account is not None:
            self._accounts.failed(account, now)

    def unseen(self, account: str, address: str) -> None:
        """The attempt was never looked at: it counts for nothing."""
        self._addresses.forgive(address)
        self._accounts.forgive(account)

    def succeeded(self, account: str | None, address: str) -> None:
        """The account is clean again. The address is only forgiven this attempt, or one good login would pay for guessing at others."""
        self._addresses.forgive(address)
        if account is not None:
            self._accounts.clear(account)
