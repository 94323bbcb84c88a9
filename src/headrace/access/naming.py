"""Checks of the names of users, roles, subjects and grants. Rejects names that cannot be distinguished in a log or look like syntax."""

from __future__ import annotations

import unicodedata

from headrace.access.policy import ANONYMOUS, ANY_KIND, EVERYBODY, KINDS, Effect, Grant, Rule
from headrace.broker.names import check_name
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
