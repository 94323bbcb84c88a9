"""The rules, one property at a time; `test_matrix.py` compares all of them with an independent reading."""

from __future__ import annotations

import pytest

from headrace.access.policy import BUILT_IN_ROLES, Effect, Grant, Key, Match, Policy, Role, Rule, User, decide, explain
from headrace.broker.authorizer import Action, Principal, Resource

ANN = Principal("ann", "flymq", "password:1")
ORDERS = Resource("topic", "orders")


def rule(subject: str, actions: str, resource: str, effect: Effect = Effect.ALLOW) -> Rule:
    """`topic:orders*` is a prefix."""
    kind, _, name = resource.partition(":")
    match = Match.PREFIX if name.endswith("*") else Match.LITERAL
    return Rule(subject, effect, Grant(frozenset(map(Action, actions.split())), kind, match, name.removesuffix("*")))


def policy(*rules: Rule, roles: str = "", enabled: bool = True, **keys: Key) -> Policy:
    return Policy({"ann": User(frozenset(roles.split()), enabled, 1)}, rules=rules, keys=keys)


def test_without_a_rule_nothing_is_allowed() -> None:
    assert not any(decide(policy(), ANN, action, Resource(kind, "x")) for action in Action for kind in ("topic", "group", "broker"))


def test_an_admin_may_do_everything_but_touch_internal_topics() -> None:
    rules = policy(roles="admin")
    assert all(
        decide(rules, ANN, action, Resource(kind, "x"))
        for action in Action
        for kind in ("topic", "group", "transaction", "writer", "broker")
    )
    assert not any(decide(rules, ANN, action, Resource("topic", "__audit")) for action in Action)


@pytest.mark.parametrize("subject", ["*", "user:ann", "role:producer"])
@pytest.mark.parametrize("order", [1, -1])
def test_deny_wins_over_rules_and_roles_in_whatever_order(subject: str, order: int) -> None:
    rules = [rule("user:ann", "publish", "topic:*"), rule(subject, "publish", "topic:orders", Effect.DENY)][::order]
    for roles in ("producer", "producer admin"):
        assert not decide(policy(*rules, roles=roles), ANN, Action.PUBLISH, ORDERS)
        assert decide(policy(*rules, roles=roles), ANN, Action.PUBLISH, Resource("topic", "other"))


@pytest.mark.parametrize(
    ("pattern", "name", "fits"),
    [
        ("orders", "orders", True),
        ("orders", "orders.eu", False),
        ("orders", "Orders", False),
        ("orders", "order", False),
        ("orders*", "orders", True),
        ("orders*", "orders.eu", True),
        ("orders*", "order", False),
        ("*", "anything", True),
        ("caf\u00e9", "cafe\u0301", False),
    ],
)
def test_a_name_fits_exactly_or_by_its_beginning(pattern: str, name: str, fits: bool) -> None:
    assert decide(policy(rule("user:ann", "read", f"topic:{pattern}")), ANN, Action.READ, Resource("topic", name)) is fits


def test_a_rule_about_topics_says_nothing_about_groups() -> None:
    rules = policy(rule("user:ann", "read commit", "topic:x"))
    assert not decide(rules, ANN, Action.COMMIT, Resource("group", "x"))


def test_a_disabled_user_may_nothing_not_even_what_everybody_may() -> None:
    rules = policy(rule("*", "read", "topic:orders"), roles="admin", enabled=False)
    assert not decide(rules, ANN, Action.READ, ORDERS)
    assert decide(rules, Principal("anonymous", "figg"), Action.READ, ORDERS)


def test_a_login_with_an_earlier_password_counts_no_more() -> None:
    assert not decide(policy(roles="admin"), Principal("ann", "flymq", "password:0"), Action.READ, ORDERS)
    assert not decide(Policy(), ANN, Action.READ, ORDERS)


def test_a_key_may_what_its_owner_may_within_its_scopes() -> None:
    key = Principal("ann", "blipmq", "key:k")
    narrow = Key("ann", (Grant(frozenset({Action.READ}), "topic", Match.LITERAL, "orders"),))
    assert decide(policy(roles="admin", k=Key("ann")), key, Action.PUBLISH, ORDERS)
    assert decide(policy(roles="admin", k=narrow), key, Action.READ, ORDERS)
    assert not decide(policy(roles="admin", k=narrow), key, Action.PUBLISH, ORDERS)
    assert not decide(policy(k=narrow), key, Action.READ, ORDERS), "a scope adds nothing to the owner's permissions"
    assert not decide(policy(roles="admin"), key, Action.READ, ORDERS), "revoked or expired"
    assert not decide(policy(roles="admin", k=Key("bob")), key, Action.READ, ORDERS)


def test_a_credential_of_an_unknown_kind_counts_for_nothing() -> None:
    assert not decide(policy(roles="admin"), Principal("ann", "flymq", "token:1"), Action.READ, ORDERS)


def test_a_custom_role_gives_what_it_lists_and_a_missing_one_nothing() -> None:
    clerk = Role((Grant(frozenset({Action.READ}), "topic", Match.PREFIX, "orders"),))
    rules = Policy({"ann": User(frozenset({"clerk", "gone"}), True, 1)}, {**BUILT_IN_ROLES, "clerk": clerk})
    assert decide(rules, ANN, Action.READ, ORDERS)
    assert not decide(rules, ANN, Action.PUBLISH, ORDERS)


def test_blipmq_keeps_its_own_groups_and_no_other_protocol_gets_them_by_that() -> None:
    own = Resource("group", "blipmq-7")
    assert decide(Policy(), Principal("ann", "blipmq"), Action.COMMIT, own)
    assert not decide(Policy(), Principal("ann", "flymq"), Action.COMMIT, own)
    assert not decide(Policy(), Principal("ann", "blipmq"), Action.COMMIT, Resource("group", "other"))


@pytest.mark.parametrize(
    ("rules", "roles", "enabled", "allowed", "why"),
    [
        ([], "", True, False, "no rule allows it, and there is no role"),
        ([], "guest", True, False, "no rule allows it, and the roles guest do not grant it"),
        ([], "producer", True, True, "the role producer grants it on topic:*"),
        ([], "admin", True, True, "the role admin grants it on everything"),
        ([rule("user:ann", "publish", "topic:orders")], "", True, True, "a rule for user:ann allows it on topic:orders"),
        ([rule("*", "publish", "topic:or*")], "", True, True, "a rule for everybody allows it on topic:or*"),
        (
            [rule("user:ann", "publish", "topic:*"), rule("role:producer", "publish", "topic:orders", Effect.DENY)],
            "producer",
            True,
            False,
            "a rule for role:producer denies it on topic:orders",
        ),
        ([rule("*", "publish", "topic:*")], "admin", False, False, "the user ann is disabled"),
    ],
)
def test_a_decision_is_explained_by_what_it_rests_on(rules: list[Rule], roles: str, enabled: bool, allowed: bool, why: str) -> None:
    made = policy(*rules, roles=roles, enabled=enabled)
    assert explain(made, Principal("ann"), Action.PUBLISH, ORDERS) == (allowed, why)
    assert decide(made, Principal("ann"), Action.PUBLISH, ORDERS) == allowed


def test_unknown_users_and_internal_topics_are_explained() -> None:
    assert explain(policy(), Principal("bob"), Action.READ, ORDERS)[1] == "there is no user bob, and no rule for everybody allows it"
    internal = Resource("topic", "__audit")
    assert explain(policy(roles="admin"), ANN, Action.READ, internal) == (False, "internal topics belong to the broker")
