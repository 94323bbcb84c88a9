"""Estimate the cost of judging a JSON value by a schema.

A validator evaluates every part of the schema that applies to a place of the value. `steps_per_place` bounds how many that are at one
place, whatever the value: the parts that are joined in place (`allOf`, `anyOf`, `$ref`, …) and those that are reached by the same name or
number. A value of N bytes has fewer than N places.
"""

from __future__ import annotations

from typing import Any, Final

from headrace.schemas.json_document import Document, Node

_NUMBER_STEPS: Final = 150
"""Comparing a number with a number of an enumeration, or dividing by one, takes the library as long as so many other steps."""
_SETS_MAX: Final = 2_000
"""Sets of parts that are looked at; a schema with more of them counts as if all its parts applied everywhere."""


def steps_per_place(document: Document) -> int:
    """The steps that judging one place of a value takes at most."""
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
    """These parts and all that judge the same place, each as often as it is evaluated; the document bounds how often that is."""
    found: list[dict[str, Any]] = []
    pending = list(nodes)
    while pending:
        node = pending.pop()
        if isinstance(node, dict):
            found.append(node)
            pending += [edge.target for edge in document.edges(node) if edge.place is None]
    return found


def _inside(document: Document, parts: list[dict[str, Any]]) -> list[list[Node]]:
    """The parts that judge what is inside the value, by place."""
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
