"""Users, roles, rules, API keys and the audit log.

Reading order: `policy` (the rules, as one pure function), `rows` (what is stored), `passwords`, `throttle`, `keys` (authentication),
`audit`, `directory` (the tables and their changes), `access` (all of it, as the broker uses it).
"""

from __future__ import annotations

from headrace.access.access import Access, AccessSettings, Mode
from headrace.access.policy import ANONYMOUS, Effect, Grant, Match, Policy, Role, Rule, User, decide

__all__ = ["ANONYMOUS", "Access", "AccessSettings", "Effect", "Grant", "Match", "Mode", "Policy", "Role", "Rule", "User", "decide"]
