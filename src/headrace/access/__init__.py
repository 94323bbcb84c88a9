"""Users, roles, rules, API keys and the audit log: who may do what, and who did.

Read in this order: `policy` (the rules, as one pure function), `rows` (what is kept), `passwords`, `throttle`, `keys` (who somebody is),
`audit`, `directory` (the tables and their changes), `access` (all of it in front of a broker).
"""

from __future__ import annotations

from headrace.access.access import Access, AccessSettings, Mode
from headrace.access.policy import ANONYMOUS, Effect, Grant, Match, Policy, Role, Rule, User, decide

__all__ = [
    "ANONYMOUS",
    "Access",
    "AccessSettings",
    "Effect",
    "Grant",
    "Match",
    "Mode",
    "Policy",
    "Role",
    "Rule",
    "User",
    "decide",
]
