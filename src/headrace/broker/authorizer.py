"""Authorization: every broker operation asks the `Authorizer` before it acts.

The rules are a function passed in (`Authorize`). The authorizer is on the hot path, so it caches the answers per principal, action and
resource. Call `Authorizer.forget` when the rules change. The audit hook, if set, receives every requested change of topics and groups,
and every denial once.

Only `broker.py` and `operations/`, the methods that sessions call, ask it (tests/broker/test_access.py). The modules below them get
functions for the checks that run later: `Publisher`, cursors, members of groups, transactions, delayed messages and stages.

`Broker.now`, `Broker.topic_defaults` and `Broker.health` take no principal and check nothing. Users, rules and keys are
administered outside the broker: `access/administration.py` requires ADMIN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from headrace.errors import NotAuthorized

_ANSWERS_MAX: Final = 65_536
"""Number of cached answers. The cache is cleared when it is full: asking again is cheap, tracking ages is not."""
ANONYMOUS: Final = "anonymous"
"""Name of all clients without a login and without a certificate. It is shared, so it owns nothing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """The authenticated identity of a caller, and its protocol."""

    name: str
    protocol: str = "internal"
    credential: str = ""
    """The credential used (`key:ID`, `password:GENERATION`), never the secret, so that it can be revoked separately. Empty if the
    connection authenticates the caller."""
    address: str = field(default="", compare=False)
    """Network address, for the audit log only: it does not take part in comparisons."""

    def __hash__(self) -> int:
        # Every request looks up a cache by its principal. Few principals share a name.
        return hash(self.name)

    def __eq__(self, other: object) -> bool:
        # Each connection has its own principal, and they meet in the same caches. The generated method creates two tuples.
        if not isinstance(other, Principal):
            return NotImplemented
        return self.name == other.name and self.protocol == other.protocol and self.credential == other.credential


class Action(StrEnum):
    """The requested operation."""

    PUBLISH = "publish"
    READ = "read"
    CREATE = "create"
    DELETE = "delete"
    ALTER = "alter"
    DESCRIBE = "describe"
    COMMIT = "commit"
    ADMIN = "admin"


@dataclass(frozen=True, slots=True)
class Resource:
    """The object of the operation. `kind` is one of topic, group, transaction, writer, schema, broker."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


Authorize: TypeAlias = Callable[[Principal, Action, Resource], bool]


def allow_all(who: Principal, action: Action, resource: Resource) -> bool:
    """Allow everything: the default without access rules."""
    return True


class AuditHook(Protocol):
    """Receives a request and its decision."""

    def __call__(self, who: Principal, action: Action, kind: str, name: str, allowed: bool, /) -> None: ...


_CHANGES: Final = frozenset({Action.CREATE, Action.ALTER, Action.DELETE, Action.ADMIN})


class Authorizer:
    """Calls `authorize` once per question and caches the answer."""

    def __init__(self, authorize: Authorize, audit_hook: AuditHook | None = None) -> None:
        self._authorize = authorize
        self._audit_hook = audit_hook
        self._answers: dict[tuple[Principal, Action, str, str], bool] = {}
        self._denials: set[tuple[Principal, Action, str, str]] = set()
        """Denials that the audit hook has received. A cached answer does not imply that a check was denied."""

    def allows(self, who: Principal, action: Action, kind: str, name: str) -> bool:
        question = (who, action, kind, name)
        answer = self._answers.get(question)
        if answer is None:
            if len(self._answers) >= _ANSWERS_MAX:
                self.forget()
            answer = self._answers[question] = self._authorize(who, action, Resource(kind, name))
        return answer

    def check(self, who: Principal, action: Action, kind: str, name: str) -> None:
        """Raise `NotAuthorized` unless the rules allow it."""
        allowed = self.allows(who, action, kind, name)
        if self._audit_hook is not None and (action in _CHANGES if allowed else (who, action, kind, name) not in self._denials):
            self._audit_hook(who, action, kind, name, allowed)
        if not allowed:
            self._denials.add((who, action, kind, name))
            raise NotAuthorized(principal=who.name, action=action.value, resource=str(Resource(kind, name)))

    def allows_topic(self, who: Principal, topic: str) -> bool:
        """Return whether the principal may see the topic: permission to use a topic includes this."""
        return any(self.allows(who, action, "topic", topic) for action in (Action.DESCRIBE, Action.READ, Action.PUBLISH))

    def forget(self) -> None:
        """Clear the cache after the rules changed."""
        self._answers.clear()
        self._denials.clear()
