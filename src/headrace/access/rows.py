"""Rows of the access tables. Passwords and keys are stored as hashes, and no row prints one.

Checks of the names of users, roles, subjects and grants. Rejects names that cannot be distinguished in a log or look like syntax.

API keys.

    hr_3fq7k2mzvb5a_QkVn…          hr, the id, the secret
       └─ 12 characters └─ 256 random bits

The id is not secret: it identifies the row and appears in lists and in the audit log. Only the SHA-256 of the whole key is stored.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import unicodedata
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final

from headrace.access.policy import ANONYMOUS, ANY_KIND, EVERYBODY, KINDS, Effect, Grant, Match, Role, Rule
from headrace.broker.authorizer import Action
from headrace.broker.topics import check_name
from headrace.errors import InvalidRequest


def check_user_name(name: str) -> None:
    """Raises `InvalidRequest`."""
    _check("user", name)
    if name == ANONYMOUS:
        raise InvalidRequest(f"{ANONYMOUS!r} stands for clients without a login; no user can have that name")


def check_role_name(name: str) -> None:
    _check("role", name)


def check_subject(subject: str) -> None:
    """Accept `user:NAME` (anonymous too), `role:NAME` or `*`."""
    if subject == EVERYBODY:
        return
    kind, colon, name = subject.partition(":")
    if not colon or kind not in ("user", "role"):
        raise InvalidRequest(f"{subject[:80]!r} is not a subject: use user:NAME, role:NAME or *")
    _check(kind, name)


def check_grant(grant: Grant) -> None:
    if grant.kind not in (*KINDS, ANY_KIND):
        raise InvalidRequest(f"{grant.kind[:80]!r} is not a kind of resource: use {', '.join(KINDS)} or *")
    if not grant.actions:
        raise InvalidRequest("a rule needs at least one action")
    if grant.name:
        check_name(grant.kind, grant.name)
        if not unicodedata.is_normalized("NFC", grant.name):
            raise InvalidRequest("the name is not in Unicode normal form C")


def check_rule(rule: Rule) -> None:
    check_subject(rule.subject)
    check_grant(rule.grant)
    if rule.effect is Effect.DENY and rule.grant.kind in (ANY_KIND, "broker"):
        # A rule that denies administration to everybody could never be removed.
        raise InvalidRequest("a deny rule needs a topic, a group, a transaction, a writer or a schema, never the broker or everything")


def _check(kind: str, name: str) -> None:
    check_name(kind, name)
    if not unicodedata.is_normalized("NFC", name):
        raise InvalidRequest(f"{kind} name is not in Unicode normal form C")
    if name == EVERYBODY or name != name.strip():
        raise InvalidRequest(f"{kind} name {name[:80]!r} is {EVERYBODY!r}, or begins or ends with white space")


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


PREFIX: Final = "hr"
_ID_BYTES, _SECRET_BYTES = 8, 32
_ID_CHARACTERS: Final = 12
_NO_KEY: Final = hashlib.sha256(b"").hexdigest()


@dataclass(frozen=True, slots=True)
class NewKey:
    """A new key; its text is shown once."""

    id: str
    text: str = field(repr=False)


def new_key(random_bytes: Callable[[int], bytes]) -> NewKey:
    """Create a key. The caller checks that the id is unused."""
    id = base64.b32encode(random_bytes(_ID_BYTES)).decode().lower()[:_ID_CHARACTERS]
    secret = base64.urlsafe_b64encode(random_bytes(_SECRET_BYTES)).decode().rstrip("=")
    return NewKey(id, f"{PREFIX}_{id}_{secret}")


def digest_of(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def id_of(text: str) -> str:
    """Return the id of a text that has the form of a key; empty if it has not."""
    prefix, _, rest = text.partition("_")
    id, _, _ = rest.partition("_")
    return id if prefix == PREFIX and len(id) == _ID_CHARACTERS else ""


def fits(digest: str | None, text: str) -> bool:
    """Return whether the text is the key of that digest; always False for None, in the same time."""
    return hmac.compare_digest(digest or _NO_KEY, digest_of(text)) and digest is not None
