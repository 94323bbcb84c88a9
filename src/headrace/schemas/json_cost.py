"""Cost estimate for validating a JSON value.

A validator evaluates every part of the schema that applies to a location in the value. `steps_per_place` is an upper bound for one location
of any value: the parts joined in place (`allOf`, `anyOf`, `$ref`, …) and those with the same property name or index. A value of N bytes has
fewer than N locations.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.schemas.json_document import Document, Node

_NUMBER_STEPS: Final = 150
"""Cost of comparing a number with an enumeration, or of a division, in other steps."""
_SETS_MAX: Final = 2_000
"""Maximum number of sets of parts to examine. A schema with more counts as if all its parts applied everywhere."""


def steps_per_place(document: Document) -> int:
    """Return the maximum number of steps for one location of a value."""
    pending = [_in_place(document, [document.root])]
    seen: set[frozenset[int]] = set()
    widest = 1
    while pending:
        parts = pending.pop()
        key = frozenset(map(id, parts))
        if key in seen:
            continue
        seen.add(key)
        if len(seen) > _SETS_MAX:
            return max(1, sum(map(_weight, document.parts)))
        widest = max(widest, sum(map(_weight, parts)))
        pending += [_in_place(document, targets) for targets in _inside(document, parts)]
    return widest


def _in_place(document: Document, nodes: list[Node]) -> list[dict[str, Any]]:
    """Return these parts and all that apply to the same location, as often as they are evaluated, which the document bounds."""
    found: list[dict[str, Any]] = []
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            found.append(node)
            pending += [edge.target for edge in document.edges(node) if edge.place is None]
    return found


def _inside(document: Document, parts: list[dict[str, Any]]) -> list[list[Node]]:
    """Return the parts that apply inside the value, by location."""
    named: dict[tuple[str, str], list[Node]] = {}
    wide: dict[str, list[Node]] = {"name": [], "number": []}
    for part in {id(part): part for part in parts}.values():
        for edge in document.edges(part):
            if edge.place is None:
                continue
            kind, _ = edge.place
            if kind in wide:
                named.setdefault(edge.place, []).append(edge.target)
            else:
                wide[kind.removesuffix("s")].append(edge.target)
    return [[*targets, *wide[kind]] for (kind, _), targets in named.items()] + [targets for targets in wide.values() if targets]


def _weight(part: dict[str, Any]) -> int:
    weight = 1 + len(part)
    listed = part.get("enum")
    if isinstance(listed, list):
        weight += sum(_NUMBER_STEPS if isinstance(one, int | float) else 1 for one in listed)
    if "multipleOf" in part:
        weight += _NUMBER_STEPS
    return weight
