"""JSON Schema documents: one document with internal references only, whose validation time is bounded for every value.

A validator follows references and tries alternatives, which a small schema can make exponential: `allOf` of two references to a part that
is again `allOf` of two references doubles the work at every step. So parts are counted as often as they would be evaluated
(`SCHEMA_PARTS_MAX`), a reference must not lead back to itself at the same location of the value, and in a recursive schema each location of
the value must be reached in one way only. Validation time is then proportional to the size of the value.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final, NamedTuple, TypeAlias
from urllib.parse import unquote

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_DEPTH_MAX, SCHEMA_PARTS_MAX

Node: TypeAlias = dict[str, Any] | bool

DRAFT: Final = "https://json-schema.org/draft/2020-12/schema"
_REFUSED: Final = ("$dynamicRef", "$dynamicAnchor", "$recursiveRef", "$recursiveAnchor", "$vocabulary")

# Keywords that hold parts of a schema. "In place" parts apply to the same value, the others to values inside it.
_IN_PLACE: Final = ("not", "if", "then", "else")
_IN_PLACE_LISTS: Final = ("allOf", "anyOf", "oneOf")
_IN_PLACE_MAPS: Final = ("dependentSchemas",)
_NAMED: Final = ("properties",)
_ANY_NAME: Final = ("additionalProperties", "unevaluatedProperties", "propertyNames")
_ANY_NAME_MAPS: Final = ("patternProperties",)
_NUMBERED: Final = ("prefixItems",)
_ANY_NUMBER: Final = ("items", "contains", "unevaluatedItems")
_UNUSED_MAPS: Final = ("$defs", "definitions")
_UNEVALUATED: Final = frozenset({"unevaluatedProperties", "unevaluatedItems"})
_STEPS_MAX: Final = 20 * SCHEMA_PARTS_MAX
"""Maximum steps of the recursion check."""


class Edge(NamedTuple):
    """Edge from one part to another. `place` is None in place, else the location in the value: ("name", n), ("number", i) or a keyword."""

    place: tuple[str, str] | None
    target: Node
    pointer: str


class Document:
    """A definition and its parts by JSON pointer. The constructor raises `InvalidSchema`."""

    def __init__(self, root: Any) -> None:
        if not isinstance(root, dict | bool):
            raise InvalidSchema("a JSON Schema is an object")
        self.root: Node = root
        self._anchors: dict[str, Node] = {}
        self._pointers: dict[int, str] = {}
        self.parts: list[dict[str, Any]] = []
        self._collect(root, "", 0)
        self._check_cost()

    def resolve(self, reference: str) -> Node:
        """Return the part that a `$ref` points to."""
        if not reference.startswith("#"):
            raise InvalidSchema(f"$ref {reference[:80]!r}: only references inside the schema are followed")
        fragment = unquote(reference[1:])
        if fragment and not fragment.startswith("/"):
            if fragment not in self._anchors:
                raise InvalidSchema(f"$ref {reference[:80]!r} leads nowhere")
            return self._anchors[fragment]
        at: Any = self.root
        for step in fragment.split("/")[1:]:
            step = step.replace("~1", "/").replace("~0", "~")
            if isinstance(at, list) and step.isdigit() and len(step) < 6 and int(step) < len(at):
                at = at[int(step)]
            elif isinstance(at, dict) and step in at:
                at = at[step]
            else:
                raise InvalidSchema(f"$ref {reference[:80]!r} leads nowhere")
        if not isinstance(at, dict | bool) or (isinstance(at, dict) and id(at) not in self._pointers):
            raise InvalidSchema(f"$ref {reference[:80]!r} leads to something that is no schema")
        return at

    def _collect(self, node: Any, pointer: str, depth: int) -> None:
        if not isinstance(node, dict):
            return  # the meta-schema reports what is not a schema
        if depth > SCHEMA_DEPTH_MAX:
            raise InvalidSchema(f"the schema is nested more than {SCHEMA_DEPTH_MAX} levels deep")
        if len(self._pointers) >= SCHEMA_PARTS_MAX:
            raise InvalidSchema(f"the schema has more than {SCHEMA_PARTS_MAX} parts")
        self._pointers[id(node)] = pointer or "/"
        self.parts.append(node)
        self._check_keywords(node, pointer)
        for keyword, _, part in _parts(node, with_definitions=True):
            self._collect(part, f"{pointer}/{keyword}", depth + 1)

    def _check_keywords(self, node: dict[str, Any], pointer: str) -> None:
        where = pointer or "/"
        for keyword in _REFUSED:
            if keyword in node:
                raise InvalidSchema(f"{where}: {keyword} is not supported")
        if node.get("$schema", DRAFT) not in (DRAFT, DRAFT + "#"):
            raise InvalidSchema(f"{where}: $schema {str(node['$schema'])[:80]!r} is not draft 2020-12")
        if "$id" in node and pointer:
            raise InvalidSchema(f"{where}: a part with an $id of its own is not supported")
        anchor = node.get("$anchor")
        if isinstance(anchor, str):
            self._anchors[anchor] = node

    def edges(self, node: Node) -> Iterator[Edge]:
        """Return the parts that are evaluated with this one."""
        if not isinstance(node, dict):
            return
        pointer = self._pointers.get(id(node), "/")
        for keyword, place, part in _parts(node):
            if isinstance(part, dict | bool):
                yield Edge(place, part, f"{pointer}/{keyword}")
        reference = node.get("$ref")
        if isinstance(reference, str):
            yield Edge(None, self.resolve(reference), f"{pointer}/$ref")

    # Cost of a value.

    def _check_cost(self) -> None:
        for part in Components(self, in_place_only=True).recursive:
            raise InvalidSchema(f"{self._pointers[id(part)]}: the schema refers to itself without going into the value")
        order = Components(self)
        costs: dict[int, int] = {}
        for node in order.finished:
            costs[id(node)] = self._cost(node, order.component_of, costs)
        budget = _STEPS_MAX
        for node in order.recursive:
            budget -= self._check_recursion(node, order.component_of, costs)
            if budget < 0:
                raise InvalidSchema("the schema contains itself in too many ways")

    def _cost(self, node: dict[str, Any], component_of: dict[int, int], known: dict[int, int]) -> int:
        """Return how many parts are evaluated with this one. Parts of its own cycle count once; `_check_recursion` checks them."""
        parts = 1
        for edge in self.edges(node):
            if isinstance(edge.target, dict):
                parts += 1 if component_of[id(edge.target)] == component_of[id(node)] else known[id(edge.target)]
        if _UNEVALUATED & node.keys():
            parts *= 2  # the validator evaluates the parts again to find the evaluated properties
        self._check_parts(node, parts)
        return parts

    def _check_parts(self, node: dict[str, Any], parts: int) -> None:
        if parts > SCHEMA_PARTS_MAX:
            raise InvalidSchema(f"{self._pointers[id(node)]}: with its references, the schema has more than {SCHEMA_PARTS_MAX} parts")

    def _check_recursion(self, node: dict[str, Any], component_of: dict[int, int], costs: dict[int, int]) -> int:
        """Check that each location inside the value leads back into the cycle in one way only; two ways double the work at every level.

        Return the number of steps.
        """
        ways = _Ways()
        pending, steps, parts = [node], 0, 0
        while pending:
            at = pending.pop()
            steps += 1
            parts += 1
            if _UNEVALUATED & at.keys():
                raise InvalidSchema(f"{self._pointers[id(at)]}: unevaluated parts in a schema that contains itself are not supported")
            for edge in self.edges(at):
                if not isinstance(edge.target, dict):
                    continue
                if edge.place is None:
                    pending.append(edge.target)
                elif component_of[id(edge.target)] != component_of[id(node)]:
                    parts += costs[id(edge.target)]
                elif not ways.add(edge.place, id(at)):
                    raise InvalidSchema(f"{edge.pointer}: the schema contains itself in two ways at one place of the value")
            self._check_parts(node, parts)
        return steps


class _Ways:
    """Locations of a value that lead back into a cycle, with the part that names each."""

    def __init__(self) -> None:
        self._owners: dict[tuple[str, str], int] = {}
        self._wide: list[tuple[tuple[str, str], int]] = []

    def add(self, place: tuple[str, str], owner: int) -> bool:
        """Add a location; return False if another way may lead to it."""
        is_wide = place[0] in ("names", "numbers")
        rivals = self._owners.items() if is_wide else self._wide
        if place in self._owners or any(_overlap(other, place, same_part=its == owner) for other, its in rivals):
            return False
        self._owners[place] = owner
        if is_wide:
            self._wide.append((place, owner))
        return True


_KINDS: Final = {"name": "object", "names": "object", "number": "array", "numbers": "array"}


def _overlap(one: tuple[str, str], other: tuple[str, str], *, same_part: bool) -> bool:
    """Return whether both may apply to the same location. `additionalProperties` and `items` apply to what their neighbours leave."""
    if _KINDS[one[0]] != _KINDS[other[0]]:
        return False
    if one[0] == other[0] and one[0] in ("name", "number"):
        return one[1] == other[1]
    words = {one[1] if one[0].endswith("s") else "", other[1] if other[0].endswith("s") else ""}
    return not (same_part and "" in words and words <= {"", "additionalProperties", "items"})


def _parts(node: dict[str, Any], *, with_definitions: bool = False) -> Iterator[tuple[str, tuple[str, str] | None, Any]]:
    """Yield (keyword path, location, part) of everything directly inside."""
    for keyword in _IN_PLACE:
        if keyword in node:
            yield keyword, None, node[keyword]
    for keyword in _ANY_NAME:
        if keyword in node:
            yield keyword, ("names", keyword), node[keyword]
    for keyword in _ANY_NUMBER:
        if keyword in node:
            yield keyword, ("numbers", keyword), node[keyword]
    for keyword in _IN_PLACE_LISTS + _NUMBERED:
        listed = node.get(keyword)
        if isinstance(listed, list):
            for index, part in enumerate(listed):
                yield f"{keyword}/{index}", None if keyword in _IN_PLACE_LISTS else ("number", str(index)), part
    for keyword in _IN_PLACE_MAPS + _NAMED + _ANY_NAME_MAPS + (_UNUSED_MAPS if with_definitions else ()):
        mapped = node.get(keyword)
        if isinstance(mapped, dict):
            for name, part in mapped.items():
                place = ("name", name) if keyword in _NAMED else ("names", f"{keyword} {name}") if keyword in _ANY_NAME_MAPS else None
                yield f"{keyword}/{name}", place, part


class Components:
    """Cycles of a document (its strongly connected components, by Tarjan), and its parts in the order of completion."""

    def __init__(self, document: Document, *, in_place_only: bool = False) -> None:
        self.component_of: dict[int, int] = {}
        self.finished: list[dict[str, Any]] = []
        """Parts in an order where each follows everything it refers to outside its own cycle."""
        self.recursive: list[dict[str, Any]] = []
        self._document = document
        self._in_place_only = in_place_only
        self._index: dict[int, int] = {}
        self._low: dict[int, int] = {}
        self._open: list[dict[str, Any]] = []
        for part in document.parts if in_place_only else [document.root]:
            if isinstance(part, dict) and id(part) not in self._index:
                self._walk(part)

    def _walk(self, root: dict[str, Any]) -> None:
        stack = [(root, self._enter(root))]
        while stack:
            node, targets = stack[-1]
            for target in targets:
                if id(target) not in self._index:
                    stack.append((target, self._enter(target)))
                    break
                if id(target) not in self.component_of:
                    self._low[id(node)] = min(self._low[id(node)], self._index[id(target)])
            else:
                stack.pop()
                if stack:
                    above = id(stack[-1][0])
                    self._low[above] = min(self._low[above], self._low[id(node)])
                self._leave(node)

    def _enter(self, node: dict[str, Any]) -> Iterator[dict[str, Any]]:
        self._index[id(node)] = self._low[id(node)] = len(self._index)
        self._open.append(node)
        return iter([edge.target for edge in self._edges(node) if isinstance(edge.target, dict)])

    def _edges(self, node: dict[str, Any]) -> list[Edge]:
        return [edge for edge in self._document.edges(node) if edge.place is None or not self._in_place_only]

    def _leave(self, node: dict[str, Any]) -> None:
        if self._low[id(node)] != self._index[id(node)]:
            return
        number = len(self.finished)
        members: list[dict[str, Any]] = []
        while not members or members[-1] is not node:
            members.append(self._open.pop())
        for member in members:
            self.component_of[id(member)] = number
        self.finished += members
        if len(members) > 1 or any(edge.target is node for edge in self._edges(node)):
            self.recursive += members
