"""Rows of the access tables. Passwords and keys are stored as hashes, and no row prints one."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.access.policy import Effect, Grant, Match, Role, Rule
from headrace.broker.authorizer import Action

_ACTIONS = frozenset(action.value for action in Action)


@dataclass(frozen=True, slots=True)
class GrantRow:
    actions: list[str]
    kind: str
    match: str
    name: str

    @classmethod
    def of(cls, grant: Grant) -> GrantRow:
        return cls(sorted(action.value for action in grant.actions), grant.kind, grant.match.value, grant.name)

    def grant(self) -> Grant:
        # An action of a later release that is unknown here allows nothing and denies nothing.
        known = frozenset(Action(word) for word in self.actions if word in _ACTIONS)
        return Grant(known, self.kind, Match(self.match), self.name)


@dataclass(frozen=True, slots=True)
class UserRow:
    roles: list[str]
    enabled: bool
    hash: str = field(repr=False)
    """argon2id in its usual text form; empty: the user has no password and authenticates by certificate or key."""
    generation: int
    created_ms: int
    updated_ms: int


@dataclass(frozen=True, slots=True)
class RoleRow:
    grants: list[GrantRow]
    description: str

    def role(self) -> Role:
        return Role(tuple(grant.grant() for grant in self.grants), self.description)


RuleKey = tuple[str, str, str, str, str]
"""(subject, effect, kind, match, name): one row for each, so that granting an action again changes nothing."""


@dataclass(frozen=True, slots=True)
class RuleRow:
    actions: list[str]


def rule_of(key: RuleKey, row: RuleRow) -> Rule:
    subject, effect, kind, match, name = key
    return Rule(subject, Effect(effect), GrantRow(row.actions, kind, match, name).grant())


def rule_key(rule: Rule) -> RuleKey:
    grant = rule.grant
    return rule.subject, rule.effect.value, grant.kind, grant.match.value, grant.name


@dataclass(frozen=True, slots=True)
class KeyRow:
    owner: str
    digest: str = field(repr=False)
    """SHA-256 of the whole key, in hexadecimal. A key has 256 random bits, so a slower hash is not needed."""
    scopes: list[GrantRow]
    created_ms: int
    expires_ms: int = 0
    """0: never."""
    revoked_ms: int = 0
    """0: in force."""
    description: str = ""
