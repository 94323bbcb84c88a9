"""People and statements about them, with an independent reading of the statements.

`policy()` turns the statements into a Headrace policy. `expected()` evaluates them in another way and shares no code with
`headrace.access`.
"""

from __future__ import annotations

from dataclasses import dataclass

from headrace.access.policy import BUILT_IN_ROLES, Effect, Grant, Key, Match, Policy, Role, Rule, User
from headrace.broker.authorizer import Action, Principal

TOPICS = ["own", "own.sub", "ownership", "Own", "other", "public", "caf\u00e9", "cafe\u0301", "team.x", "blipmq-1"]
"""Existing topics, each with a record, a group of the same name, and a delayed message. One name is not in normal form C: it exists
in rules and requests only."""
OWNER = "admin"
"""Owner of all delayed messages."""
ABSENT = "absent"
INTERNAL = "__audit"
NAMES = [*TOPICS, ABSENT, INTERNAL]

STATEMENTS = [
    "allow everybody read public",
    "allow alice read own",
    "allow alice read café",
    "allow bob publish own*",
    "allow carol commit,describe group:own",
    "deny  dave read own*",
    "deny  dave commit group:own",
    "allow certificate read,publish own",
    "allow certificate commit,describe group:own",
    "allow frank create,alter,delete,describe team.*",
    "allow frank delete,describe group:*",
    "allow frank describe broker:headrace",
    "allow frank create,alter,delete,describe schema:team.*",
    "allow alice describe schema:own",
    "deny  dave describe schema:own*",
    "deny  producer publish other",
    "allow clerk read,publish,describe team.*",
    "allow clerk publish transaction:*",
    "allow clerk publish writer:*",
    "allow alice describe writer:own",
    "allow bob publish writer:own*",
    "allow bob publish transaction:own*",
    "allow frank delete writer:team.*",
    "deny  dave publish writer:own.sub",
    "deny  dave publish transaction:own.sub",
    "allow mallory admin,read,publish __*",
]

EVERYTHING = ",".join(Action)
ROLES = {
    "admin": [f"{EVERYTHING} {kind}:*" for kind in ("topic", "group", "transaction", "writer", "schema", "broker")],
    "producer": ["publish,describe topic:*", "publish transaction:*", "publish writer:*", "describe schema:*"],
    "consumer": ["read,describe topic:*", "read,describe,commit group:*", "describe schema:*"],
    "clerk": [],
}
"""Grants of the roles, in the same words. `clerk` is a custom role; the statements above define it."""


@dataclass(frozen=True)
class Person:
    name: str
    roles: tuple[str, ...] = ()
    credential: str = ""
    works: bool = True
    """False for a credential that is disabled, revoked or outdated."""
    scope: str | None = None

    def at(self, protocol: str) -> Principal:
        return Principal(self.name, protocol, self.credential)


PEOPLE = {
    "anonymous": Person("anonymous"),
    "alice": Person("alice", (), "password:1"),
    "bob": Person("bob", (), "password:1"),
    "carol": Person("carol", (), "password:1"),
    "dave": Person("dave", ("producer", "consumer"), "password:1"),
    "erin": Person("erin", ("clerk",), "password:1"),
    "frank": Person("frank", (), "password:1"),
    "mallory": Person("mallory", (), "password:1"),
    "root": Person("admin", ("admin",), "password:1"),
    "disabled": Person("disabled", ("admin",), "password:1", works=False),
    "yesterday": Person("admin", ("admin",), "password:0", works=False),
    "deleted": Person("ghost", (), "password:1", works=False),
    "key": Person("admin", ("admin",), "key:wide"),
    "narrow key": Person("admin", ("admin",), "key:narrow", scope="read,publish topic:own*"),
    "key of alice": Person("alice", (), "key:alice", scope="read,publish topic:*"),
    "revoked key": Person("admin", ("admin",), "key:revoked", works=False),
    "foreign key": Person("bob", (), "key:alice", works=False),
    "certificate": Person("certificate"),
    "stranger": Person("stranger"),
}


# The Headrace policy


def _grant(actions: str, resource: str) -> Grant:
    kind, colon, name = resource.partition(":")
    if not colon:
        kind, name = "topic", kind
    match = Match.PREFIX if name.endswith("*") else Match.LITERAL
    return Grant(frozenset(map(Action, actions.split(","))), kind, match, name.removesuffix("*"))


def policy() -> Policy:
    rules = []
    for statement in STATEMENTS:
        effect, subject, actions, resource = statement.split()
        subject = "*" if subject == "everybody" else f"role:{subject}" if subject in ROLES else f"user:{subject}"
        rules.append(Rule(subject, Effect(effect), _grant(actions, resource)))
    known = {person.name: person for person in PEOPLE.values() if person.credential == "password:1" and person.name != "ghost"}
    return Policy(
        users={name: User(frozenset(person.roles), name != "disabled", 1) for name, person in known.items()},
        roles={**BUILT_IN_ROLES, "clerk": Role()},
        rules=rules,
        keys={
            "wide": Key("admin"),
            "narrow": Key("admin", (_grant("read,publish", "own*"),)),
            "alice": Key("alice", (_grant("read,publish", "*"),)),
        },
    )


# The independent reading


def _fits(words: str, action: str, kind: str, name: str) -> bool:
    actions, resource = words.split()
    if ":" not in resource:
        resource = f"topic:{resource}"
    said, asked = resource.split(":", 1), (kind, name)
    if action not in actions.split(",") or said[0] != asked[0]:
        return False
    return name[: len(said[1]) - 1] == said[1][:-1] if said[1][-1:] == "*" else name == said[1]


def expected(who: str, protocol: str, action: str, kind: str, name: str) -> bool:
    """Return whether the statements allow it."""
    person = PEOPLE[who]
    if kind == "topic" and name[:2] == "__":
        return False
    if protocol == "blipmq" and kind == "group" and name[:7] == "blipmq-":
        return True
    if not person.works:
        return False
    if person.scope is not None and not _fits(person.scope, action, kind, name):
        return False
    said = {"allow": False, "deny": False}
    for statement in STATEMENTS:
        effect, subject, rest = statement.split(maxsplit=2)
        if subject in ("everybody", person.name, *person.roles) and _fits(rest, action, kind, name):
            said[effect] = True
    for role in person.roles:
        said["allow"] |= any(_fits(words, action, kind, name) for words in ROLES[role])
    return said["allow"] and not said["deny"]


def needed(who: str, protocol: str, needs: str, name: str) -> bool:
    """Return whether a requirement such as `read t` or `commit g & read t` is met, or one of several separated by `|`.

    t is the topic, d its dead letters, g the group, s the schema and a the writer and i the transaction of the same name, x a
    transaction without a name, b the broker. `owns m`: the delayed message is theirs. Empty: nothing is needed; `never`: always denied.
    """
    places = {
        "t": ("topic", name),
        "d": ("topic", f"{name}.dlq"),
        "g": ("group", name),
        "s": ("schema", name),
        "a": ("writer", name),
        "i": ("transaction", name),
        "x": ("transaction", ""),
        "b": ("broker", "headrace"),
    }
    if needs in ("", "never"):
        return not needs

    def is_met(word: str) -> bool:
        action, place = word.split()
        return PEOPLE[who].name == OWNER if action == "owns" else expected(who, protocol, action, *places[place])

    return any(all(map(is_met, alternative.split("&"))) for alternative in needs.split("|"))
