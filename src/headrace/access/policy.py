"""The rules: one pure function over one immutable policy.

    internal topic?                          deny
    credential known, in force, in scope?    else deny
    user enabled?                            else deny
    a deny rule matches?                     deny: it also overrides roles
    an allow rule or a role matches?         allow
    no match?                                deny

A subject is `user:NAME`, `role:NAME` or `*` (everybody, including clients without a login). Names are compared exactly. Topic names are
in Unicode normal form C and case matters, so two names that look alike are different names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from types import MappingProxyType
from typing import Final

from headrace.broker import authorizer as access
from headrace.broker.authorizer import Action, Principal, Resource
from headrace.broker.topics import INTERNAL_PREFIX

ANONYMOUS: Final = access.ANONYMOUS
"""Principal of clients without a login and without a certificate. No user can have this name."""
EVERYBODY: Final = "*"
"""The subject that matches everybody."""
ANY_KIND: Final = "*"
KINDS: Final = ("topic", "group", "transaction", "writer", "schema", "broker")
"""Kinds of resources. The broker is one resource: ADMIN on it allows managing users, rules and keys and reading the audit log."""
BROKER: Final = Resource("broker", "headrace")
_OWN_GROUPS: Final = ("blipmq", "blipmq-")
"""Groups of BlipMQ subscriptions. A peer cannot choose such a name; only reading the topic needs a permission."""


class Effect(StrEnum):
    ALLOW = "allow"
    DENY = "deny"


class Match(StrEnum):
    """Comparison of a rule's name. The empty prefix matches everything."""

    LITERAL = "literal"
    PREFIX = "prefix"


@dataclass(frozen=True, slots=True)
class Grant:
    """Actions on resources of a kind whose name matches."""

    actions: frozenset[Action]
    kind: str = ANY_KIND
    match: Match = Match.PREFIX
    name: str = ""

    def covers(self, action: Action, resource: Resource) -> bool:
        if action not in self.actions or self.kind not in (ANY_KIND, resource.kind):
            return False
        return resource.name == self.name if self.match is Match.LITERAL else resource.name.startswith(self.name)


@dataclass(frozen=True, slots=True)
class Rule:
    """An allow or deny rule of a subject."""

    subject: str
    effect: Effect
    grant: Grant


@dataclass(frozen=True, slots=True)
class Role:
    """A named set of grants."""

    grants: tuple[Grant, ...] = ()
    description: str = ""


@dataclass(frozen=True, slots=True)
class User:
    """Properties of a user that the rules need. `generation` changes with every new password, which ends older logins."""

    roles: frozenset[str] = frozenset()
    enabled: bool = True
    generation: int = 0


@dataclass(frozen=True, slots=True)
class Key:
    """An API key in force. Without scopes it may do what its owner may, with scopes never more than they say."""

    owner: str
    scopes: tuple[Grant, ...] = ()


EVERYTHING: Final = frozenset(Action)
_USE: Final = frozenset({Action.READ, Action.DESCRIBE, Action.COMMIT})
BUILT_IN_ROLES: Final[Mapping[str, Role]] = MappingProxyType(
    {
        "admin": Role((Grant(EVERYTHING),), "everything, users and rules included"),
        "producer": Role(
            (
                Grant(frozenset({Action.PUBLISH, Action.DESCRIBE}), "topic"),
                Grant(frozenset({Action.PUBLISH}), "transaction"),
                Grant(frozenset({Action.PUBLISH}), "writer"),
                Grant(frozenset({Action.DESCRIBE}), "schema"),
            ),
            "publish to every topic, alone, in transactions and exactly once",
        ),
        "consumer": Role(
            (
                Grant(frozenset({Action.READ, Action.DESCRIBE}), "topic"),
                Grant(_USE, "group"),
                Grant(frozenset({Action.DESCRIBE}), "schema"),
            ),
            "read every topic, commit for every group",
        ),
        "guest": Role((), "nothing but what rules add"),
        "sdk": Role((), "nothing more; FlyMQ answers its holders as the original does"),
    }
)


@dataclass(frozen=True)
class Policy:
    """Everything a decision depends on. Immutable: a change creates a new one."""

    users: Mapping[str, User] = field(default_factory=dict)
    roles: Mapping[str, Role] = field(default_factory=lambda: BUILT_IN_ROLES)
    rules: Iterable[Rule] = ()
    keys: Mapping[str, Key] = field(default_factory=dict)
    """By id, without revoked and expired keys."""

    def __post_init__(self) -> None:
        by_subject: dict[str, list[Rule]] = {}
        for rule in self.rules:
            by_subject.setdefault(rule.subject, []).append(rule)
        object.__setattr__(self, "_by_subject", {subject: tuple(rules) for subject, rules in by_subject.items()})

    def rules_of(self, subject: str) -> tuple[Rule, ...]:
        by_subject: Mapping[str, tuple[Rule, ...]] = self.__dict__["_by_subject"]
        return by_subject.get(subject, ())


def decide(policy: Policy, who: Principal, action: Action, resource: Resource) -> bool:
    """Return whether the policy allows the action."""
    if resource.kind == "topic" and resource.name.startswith(INTERNAL_PREFIX):
        return False
    if resource.kind == "group" and who.protocol == _OWN_GROUPS[0] and resource.name.startswith(_OWN_GROUPS[1]):
        return True
    if not _is_in_force(policy, who, action, resource):
        return False
    user = policy.users.get(who.name)
    if user is not None and not user.enabled:
        return False
    roles = user.roles if user is not None else frozenset()
    subjects = (EVERYBODY, user_subject(who.name), *map(role_subject, roles))
    rules = [rule for subject in subjects for rule in policy.rules_of(subject) if rule.grant.covers(action, resource)]
    if any(rule.effect is Effect.DENY for rule in rules):
        return False
    if rules:
        return True
    return any(grant.covers(action, resource) for role in roles if role in policy.roles for grant in policy.roles[role].grants)


def explain(policy: Policy, who: Principal, action: Action, resource: Resource) -> tuple[bool, str]:
    """Return the decision and what it rests on, in the order of `decide`."""
    allowed = decide(policy, who, action, resource)
    user = policy.users.get(who.name)
    if resource.kind == "topic" and resource.name.startswith(INTERNAL_PREFIX):
        return allowed, "internal topics belong to the broker"
    if user is not None and not user.enabled:
        return allowed, f"the user {who.name} is disabled"
    roles = sorted(user.roles) if user is not None else []
    subjects = (EVERYBODY, user_subject(who.name), *map(role_subject, roles))
    rules = [rule for subject in subjects for rule in policy.rules_of(subject) if rule.grant.covers(action, resource)]
    for rule in sorted(rules, key=lambda rule: rule.effect is Effect.ALLOW):  # a deny rule overrides all others
        whom = "everybody" if rule.subject == EVERYBODY else rule.subject
        return allowed, f"a rule for {whom} {'allows' if rule.effect is Effect.ALLOW else 'denies'} it on {shown_resource(rule.grant)}"
    for role in roles:
        for grant in policy.roles[role].grants if role in policy.roles else ():
            if grant.covers(action, resource):
                return allowed, f"the role {role} grants it on {shown_resource(grant)}"
    if user is None and who.name != ANONYMOUS:
        return allowed, f"there is no user {who.name}, and no rule for everybody allows it"
    held = f"the roles {', '.join(roles)} do not grant it" if roles else "there is no role"
    return allowed, f"no rule allows it, and {held}"


def shown_resource(grant: Grant) -> str:
    """Return the resources of a grant as text: `topic:orders.*`."""
    return "everything" if grant.kind == ANY_KIND else f"{grant.kind}:{grant.name}{'*' if grant.match is Match.PREFIX else ''}"


def _is_in_force(policy: Policy, who: Principal, action: Action, resource: Resource) -> bool:
    """Return whether the principal's credential is in force, and covers this action."""
    kind, _, mark = who.credential.partition(":")
    match kind:
        case "":
            return True
        case "key":
            key = policy.keys.get(mark)
            if key is None or key.owner != who.name:
                return False
            return not key.scopes or any(scope.covers(action, resource) for scope in key.scopes)
        case "password":
            user = policy.users.get(who.name)
            return user is not None and str(user.generation) == mark
        case _:
            return False


def roles_held(policy: Policy, who: Principal) -> frozenset[str]:
    """Return the roles of the principal: none for a credential that is not in force, or for a key limited by scopes."""
    user = policy.users.get(who.name)
    kind, _, mark = who.credential.partition(":")
    if user is None or not user.enabled:
        return frozenset()
    if kind == "key":
        key = policy.keys.get(mark)
        return user.roles if key is not None and key.owner == who.name and not key.scopes else frozenset()
    return user.roles if kind == "" or mark == str(user.generation) else frozenset()


def user_subject(name: str) -> str:
    return f"user:{name}"


def role_subject(name: str) -> str:
    return f"role:{name}"


def key_credential(id: str) -> str:
    return f"key:{id}"


def password_credential(generation: int) -> str:
    return f"password:{generation}"
