"""Who may do what: the one gate that every broker verb passes.

The rules themselves are a function given from outside (`Authorize`). Its answers are remembered per principal, action and
resource, because the gate stands on the hot path; `Authorizer.forget` must be called whenever the rules change. A witness, if there is one,
is told of every change of topics and groups that was asked for, and of every denial once.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, Protocol, TypeAlias

from headrace.errors import NotAuthorized

_ANSWERS_MAX: Final = 65_536
"""Remembered answers. The memory is emptied when it is full: asking again is cheap, tracking ages is not."""
ANONYMOUS: Final = "anonymous"
"""The name of everybody who comes without a login and without a certificate. It is shared, so it owns nothing."""


@dataclass(frozen=True, slots=True)
class Principal:
    """Who asks, and through which protocol."""

    name: str
    protocol: str = "internal"
    credential: str = ""
    """What was shown, by its mark (`key:ID`, `password:GENERATION`), never the secret: so that it can be withdrawn by itself. Empty for
    those whom the connection vouches for."""
    address: str = field(default="", compare=False)
    """Where they are, for the audit log alone: whoever comes from two places is one principal."""


class Action(StrEnum):
    """What is asked for."""

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
    """What it is asked of. `kind` is one of topic, group, transaction, schema, broker."""

    kind: str
    name: str

    def __str__(self) -> str:
        return f"{self.kind} {self.name!r}"


Authorize: TypeAlias = Callable[[Principal, Action, Resource], bool]


def allow_all(who: Principal, action: Action, resource: Resource) -> bool:
    """The rule of a broker without rules."""
    return True


class AuditHook(Protocol):
    """Hears what was asked and how it was answered."""

    def __call__(self, who: Principal, action: Action, kind: str, name: str, allowed: bool, /) -> None: ...


_CHANGES: Final = frozenset({Action.CREATE, Action.ALTER, Action.DELETE, Action.ADMIN})


class Authorizer:
    """Asks `authorize` once per question and remembers the answer."""

    def __init__(self, authorize: Authorize, audit_hook: AuditHook | None = None) -> None:
        self._authorize = authorize
        self._audit_hook = audit_hook
        self._answers: dict[tuple[Principal, Action, str, str], bool] = {}
        self._denials: set[tuple[Principal, Action, str, str]] = set()
        """Those the witness was told of. That somebody was asked about before does not mean that they were refused anything."""

    def allows(self, who: Principal, action: Action, kind: str, name: str) -> bool:
        question = (who, action, kind, name)
        answer = self._answers.get(question)
        if answer is None:
            if len(self._answers) >= _ANSWERS_MAX:
                self.forget()
            answer = self._answers[question] = self._authorize(who, action, Resource(kind, name))
        return answer

    def check(self, who: Principal, action: Action, kind: str, name: str) -> None:
        """Raises `NotAuthorized` unless the rules allow it."""
        allowed = self.allows(who, action, kind, name)
        if self._audit_hook is not None and (action in _CHANGES if allowed else (who, action, kind, name) not in self._denials):
            self._audit_hook(who, action, kind, name, allowed)
        if not allowed:
            self._denials.add((who, action, kind, name))
            raise NotAuthorized(principal=who.name, action=action.value, resource=str(Resource(kind, name)))

    def allows_topic(self, who: Principal, topic: str) -> bool:
        """Whether they may know that it is there: whoever may use a topic may."""
        return any(self.allows(who, action, "topic", topic) for action in (Action.DESCRIBE, Action.READ, Action.PUBLISH))

    def forget(self) -> None:
        """The rules have changed: ask again."""
        self._answers.clear()
        self._denials.clear()
