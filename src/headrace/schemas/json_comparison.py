"""JSON Schema comparison: prove, keyword by keyword, that a reader's schema accepts all values of a writer's.

The writer's schema becomes a list of conditions that all hold (`allOf` and `$ref` unfolded). Each keyword of the reader must follow from
one of them, or be irrelevant because the writer's values have another type. Alternatives of the writer (`anyOf`, `oneOf`, several types)
are examined one by one if the whole cannot be proven. A keyword without a rule here (`not`, `if`, …) must be the same in the writer's.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import Any, Final, Generic, TypeAlias, TypeVar

from headrace.limits import SCHEMA_COMPARISONS_MAX
from headrace.schemas.json_document import Document, Node

P = TypeVar("P")
Conditions: TypeAlias = list[dict[str, Any]]
"""Conditions of the writer that all hold. With `_NOTHING` among them, there is no value."""

_TYPES: Final = ("null", "boolean", "object", "array", "number", "string")
_NONE_MISSING: Final = object()
_NOTHING: Final[dict[str, Any]] = {"enum": []}
_KEYWORDS_OF: Final[Mapping[str, str]] = {
    "minimum": "number",
    "maximum": "number",
    "exclusiveMinimum": "number",
    "exclusiveMaximum": "number",
    "multipleOf": "number",
    "minLength": "string",
    "maxLength": "string",
    "pattern": "string",
    "items": "array",
    "prefixItems": "array",
    "minItems": "array",
    "maxItems": "array",
    "uniqueItems": "array",
    "contains": "array",
    "minContains": "array",
    "maxContains": "array",
    "unevaluatedItems": "array",
    "properties": "object",
    "patternProperties": "object",
    "additionalProperties": "object",
    "propertyNames": "object",
    "required": "object",
    "minProperties": "object",
    "maxProperties": "object",
    "dependentRequired": "object",
    "dependentSchemas": "object",
    "unevaluatedProperties": "object",
}
_ANY_TYPE: Final = ("type", "enum", "const", "anyOf", "oneOf", "not", "if")
_WORD_FOR_WORD: Final[Mapping[str, tuple[str, ...]]] = {
    "not": ("not",),
    "if": ("if", "then", "else"),
    "oneOf": ("oneOf",),
    "contains": ("contains", "minContains", "maxContains"),
    "propertyNames": ("propertyNames",),
    "dependentSchemas": ("dependentSchemas",),
}
_IGNORED: Final = frozenset({"minContains", "maxContains"})
"""Keywords that have no effect without `contains`, and are compared with it."""
_CONFLICTS_MAX: Final = 8


class _TooLarge(Exception):
    """The comparison exceeds `SCHEMA_COMPARISONS_MAX`."""


class _Trail(Generic[P]):
    """Assumptions taken as proven, in order. A failed proof discards all later assumptions, which may depend on it."""

    def __init__(self) -> None:
        self._known: dict[P, None] = {}

    def __contains__(self, pair: P) -> bool:
        return pair in self._known

    def add(self, pair: P) -> int:
        """Add an assumption; return the mark to roll back to."""
        self._known[pair] = None
        return len(self._known) - 1

    def forget_since(self, mark: int) -> None:
        while len(self._known) > mark:
            self._known.popitem()


class Comparison:
    """Comparison of a writer's and a reader's schema."""

    def __init__(self, writer: Document, reader: Document) -> None:
        self._writer, self._reader = writer, reader
        self._comparisons = 0
        self._proven = _Trail[tuple[frozenset[int], int]]()
        self._alike = _Trail[tuple[int, int]]()
        self._made: dict[tuple[int, str], dict[str, Any]] = {}
        """Derived conditions by their origin. Parts are identified by object identity, so each is created once and kept."""
        self._checks: dict[str, Callable[[Conditions, dict[str, Any], str], Iterator[str]]] = {
            "enum": self._enum,
            "const": self._enum,
            "anyOf": self._any_of,
            "pattern": self._pattern,
            "multipleOf": self._multiple_of,
            "uniqueItems": self._unique_items,
            "items": self._items,
            "prefixItems": self._items,
            "required": self._required,
            "dependentRequired": self._dependent_required,
            "properties": self._properties,
            "patternProperties": self._pattern_properties,
            "additionalProperties": self._additional_properties,
            "unevaluatedProperties": self._unevaluated,
            "unevaluatedItems": self._unevaluated,
        }

    def conflicts(self) -> list[str]:
        try:
            return self._gaps(self._conditions(self._writer.root), self._reader.root, "")[:_CONFLICTS_MAX]
        except (_TooLarge, RecursionError):
            return [f"/: proving the two compatible takes more than {SCHEMA_COMPARISONS_MAX} comparisons"]

    # The writer's side.

    def _conditions(self, node: Node) -> Conditions:
        """Unfold the node to conditions that all hold."""
        if node is True:
            return []
        if node is False:
            return [_NOTHING]
        assert isinstance(node, dict)
        found: Conditions = [node]
        if "$ref" in node:
            found += self._conditions(self._writer.resolve(node["$ref"]))
        for part in node.get("allOf", ()):
            found += self._conditions(part)
        values = _values(node)
        if values is not None and values:
            found.append(self._make(node, "summary", _summary(values)))
        return found

    def _make(self, source: object, how: str, condition: dict[str, Any]) -> dict[str, Any]:
        return self._made.setdefault((id(source), how), condition)

    # One part of the reader's schema against the writer's conditions.

    def _gaps(self, ws: Conditions, reader: Node, path: str) -> list[str]:
        """Return what the writer may write and the reader does not accept."""
        self._comparisons += 1
        if self._comparisons > SCHEMA_COMPARISONS_MAX:
            raise _TooLarge
        types = _types(ws)
        if not types or reader is True or any(_values(w) == [] for w in ws):
            return []
        if reader is False:
            return [f"{path or '/'}: the reader takes no value here"]
        assert isinstance(reader, dict)
        pair = (frozenset(map(id, ws)), id(reader))
        if pair in self._proven:
            return []  # proven, or a cycle, whose gaps are found where the cycle was entered
        mark = self._proven.add(pair)
        gaps = self._direct_gaps(ws, types, reader, path)
        if gaps and self._holds_for_each_alternative(ws, types, reader, path):
            gaps = []
        if gaps:
            self._proven.forget_since(mark)
        return gaps

    def _direct_gaps(self, ws: Conditions, types: frozenset[str], reader: dict[str, Any], path: str) -> list[str]:
        found: list[str] = []
        if "$ref" in reader:
            found += self._gaps(ws, self._reader.resolve(reader["$ref"]), path)
        for part in reader.get("allOf", ()):
            found += self._gaps(ws, part, path)
        plain = {"number" if one == "integer" else one for one in types}
        done: set[str] = set()
        for keyword in reader:
            kind = _KEYWORDS_OF.get(keyword)
            if (kind is None and keyword not in _ANY_TYPE) or (kind is not None and kind not in plain) or keyword in _IGNORED:
                continue
            if keyword == "type":
                found += _type_gaps(types, reader, path)
            elif keyword in _WORD_FOR_WORD:
                found += self._word_for_word(ws, reader, keyword, path)
            elif keyword in self._checks:
                check = self._checks[keyword]
                if check.__name__ not in done:
                    done.add(check.__name__)
                    found += check(ws, reader, path)
            else:
                found += _bound_gaps(ws, reader, keyword, path)
        return found

    def _holds_for_each_alternative(self, ws: Conditions, types: frozenset[str], reader: dict[str, Any], path: str) -> bool:
        for w in ws:
            for keyword in ("anyOf", "oneOf"):
                if keyword in w:
                    without = {word: part for word, part in w.items() if word not in (keyword, "$ref", "allOf")}
                    rest = [self._make(w, f"without {keyword}", without), *(other for other in ws if other is not w)]
                    return all(not self._gaps(rest + self._conditions(branch), reader, path) for branch in w[keyword])
        if len(types) > 1 and ("anyOf" in reader or "$ref" in reader or "allOf" in reader):
            return all(not self._gaps([*ws, self._make(None, one, {"type": one})], reader, path) for one in types)
        return False

    # Keywords, in the order of the table above.

    def _enum(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        allowed = _values(reader)
        assert allowed is not None
        for w in ws:
            values = _values(w)
            if values is not None and _first_missing(values, allowed) is _NONE_MISSING:
                return
        written = [values for w in ws if (values := _values(w)) is not None]
        if written:
            missing = _first_missing(written[0], allowed)
            yield f"{path or '/'}: the writer may write {_short(missing)}, the reader's enumeration does not have it"
        else:
            yield f"{path or '/'}: the reader takes only the values of an enumeration, the writer others too"

    def _any_of(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        if not any(not self._gaps(ws, branch, path) for branch in reader["anyOf"]):
            yield f"{path or '/'}: the writer's values are not proven to fit any alternative of the reader's anyOf"

    def _word_for_word(self, ws: Conditions, reader: dict[str, Any], keyword: str, path: str) -> Iterator[str]:
        words = _WORD_FOR_WORD[keyword]
        for w in ws:
            if all((word in w) == (word in reader) and (word not in w or self._same(w[word], reader[word])) for word in words):
                return
        yield f"{path}/{keyword}: not the same in both schemas, and so not proven compatible"

    def _unevaluated(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        """Compare unevaluated keywords, which depend on all their neighbours."""
        if not any(self._same(w, reader) for w in ws):
            yield f"{path}/unevaluated: the enclosing schemas are not the same, and so not proven compatible"

    def _pattern(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        if not any(w.get("pattern") == reader["pattern"] for w in ws):
            yield f"{path or '/'}: the reader has a pattern that the writer does not have"

    def _multiple_of(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        wanted = _exact(reader["multipleOf"])
        if any("multipleOf" in w and _exact(w["multipleOf"]) % wanted == 0 for w in ws):
            return
        if "number" not in _types(ws) and wanted.numerator == 1:
            return  # integers are multiples of 1, of 1/2, …
        yield f"{path or '/'}: the reader takes multiples of {reader['multipleOf']} only"

    def _unique_items(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        if reader["uniqueItems"] and not any(w.get("uniqueItems") or w.get("maxItems", 2) <= 1 for w in ws):
            yield f"{path or '/'}: the reader wants items that differ, the writer does not promise it"

    def _items(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        longest = max([len(reader.get("prefixItems", ())), *(len(w.get("prefixItems", ())) for w in ws)])
        count_max = min([w["maxItems"] for w in ws if "maxItems" in w], default=longest + 1)
        for index in range(min(longest, count_max)):
            yield from self._gaps(self._items_at(ws, index), _item(reader, index), f"{path}/{index}")
        if count_max > longest:
            yield from self._gaps(self._items_at(ws, longest), _item(reader, longest), f"{path}/items")

    def _items_at(self, ws: Conditions, index: int) -> Conditions:
        return [condition for w in ws for condition in self._conditions(_item(w, index))]

    def _required(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        promised = {name for w in ws for name in w.get("required", ())}
        for name in reader["required"]:
            if name not in promised:
                yield f"{path}/{name}: required by the reader, the writer may leave it out"

    def _dependent_required(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        always = {name for w in ws for name in w.get("required", ())}
        for name, wanted in reader["dependentRequired"].items():
            promised = always.union(*(w.get("dependentRequired", {}).get(name, ()) for w in ws))
            if not promised.issuperset(wanted) and not self._is_never_there(ws, name):
                yield f"{path}/{name}: the reader then requires other properties too, the writer does not promise them"

    def _is_never_there(self, ws: Conditions, name: str) -> bool:
        return any(_values(condition) == [] for condition in self._property(ws, name))

    def _properties(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        for name, part in reader["properties"].items():
            conditions = self._property(ws, name)
            gaps = self._gaps(conditions, part, f"{path}/{name}")
            if gaps and not conditions:
                gaps = [f"{path}/{name}: the writer's schema allows any value here (its object is open), the reader's does not"]
            yield from gaps

    def _property(self, ws: Conditions, name: str) -> Conditions:
        """Return the writer's conditions for the property, if present."""
        found: Conditions = []
        for w in ws:
            named = w.get("properties", {})
            if name in named:
                found += self._conditions(named[name])
            elif "additionalProperties" in w and not w.get("patternProperties"):
                found += self._conditions(w["additionalProperties"])
        return found

    def _others(self, ws: Conditions) -> Iterator[tuple[dict[str, Any], list[Node]]]:
        """Return the conditions on properties of any name."""
        for w in ws:
            if "additionalProperties" in w:
                yield w, [w["additionalProperties"], *w.get("patternProperties", {}).values()]

    def _additional_properties(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        wanted = reader["additionalProperties"]
        if wanted is True:
            return
        known = reader.get("properties", {}).keys()
        names = {name for w in ws for name in w.get("properties", {})} - known
        for name in sorted(names):
            yield from self._gaps(self._property(ws, name), wanted, f"{path}/{name}")
        if "patternProperties" in reader:
            kept = reader["patternProperties"]
            others = [(w, [w["additionalProperties"]]) for w in ws if _has_patterns(w, kept)] or list(self._others(ws))
        else:
            others = list(self._others(ws))
        for _, alternatives in others:
            if all(not self._gaps(self._conditions(one), wanted, path) for one in alternatives):
                return
        yield f"{path or '/'}: the writer's object is open to properties of any name, the reader's is not"

    def _pattern_properties(self, ws: Conditions, reader: dict[str, Any], path: str) -> Iterator[str]:
        """Compare pattern properties without running a pattern: the writer has the same pattern, or all its properties are accepted."""
        for pattern, part in reader["patternProperties"].items():
            same = [w["patternProperties"][pattern] for w in ws if pattern in w.get("patternProperties", {})]
            if any(not self._gaps(self._conditions(one), part, path) for one in same):
                continue
            if any(self._all_fit(ws, w, alternatives, part, path) for w, alternatives in self._others(ws)):
                continue
            yield f"{path}/{pattern}: the writer does not promise what the reader wants of properties with this pattern"

    def _all_fit(self, ws: Conditions, w: dict[str, Any], alternatives: Sequence[Node], part: Node, path: str) -> bool:
        if any(self._gaps(self._conditions(one), part, path) for one in alternatives):
            return False
        return not any(self._gaps(self._property(ws, name), part, path) for name in w.get("properties", {}))

    def _same(self, written: Any, read: Any) -> bool:
        """Return whether two parts are identical, with references resolved on both sides."""
        self._comparisons += 1
        if self._comparisons > SCHEMA_COMPARISONS_MAX:
            raise _TooLarge
        if isinstance(written, dict) and isinstance(read, dict):
            pair = (id(written), id(read))
            if pair in self._alike:
                return True
            mark = self._alike.add(pair)
            is_same = written.keys() == read.keys() and all(self._same_entry(key, written[key], read[key]) for key in written)
            if not is_same:
                self._alike.forget_since(mark)
            return is_same
        if isinstance(written, list) and isinstance(read, list):
            return len(written) == len(read) and all(map(self._same, written, read))
        return type(written) is type(read) and bool(written == read)

    def _same_entry(self, key: str, written: Any, read: Any) -> bool:
        if key == "$ref" and isinstance(written, str) and isinstance(read, str):
            return self._same(self._writer.resolve(written), self._reader.resolve(read))
        return self._same(written, read)


def _types(ws: Conditions) -> frozenset[str]:
    """Return the types of the writer's values; `integer` is included only without `number`."""
    types = frozenset(_TYPES)
    for w in ws:
        if "type" in w:
            types = _both(types, _declared(w))
    return types


def _declared(node: dict[str, Any]) -> frozenset[str]:
    declared = node["type"]
    return frozenset([declared] if isinstance(declared, str) else declared)


def _both(one: frozenset[str], other: frozenset[str]) -> frozenset[str]:
    common = one & other
    if ("integer" in one and "number" in other) or ("integer" in other and "number" in one):
        common |= {"integer"}
    return common - {"integer"} if "number" in common else common


def _type_gaps(types: frozenset[str], reader: dict[str, Any], path: str) -> Iterator[str]:
    taken = _declared(reader)
    for one in sorted(types):
        if one not in taken and not (one == "integer" and "number" in taken):
            yield f"{path or '/'}: the writer may write {one}, the reader takes {' or '.join(sorted(taken))}"


def _values(node: dict[str, Any]) -> list[Any] | None:
    """Return the values of an enumeration; None if it is not one."""
    if "const" in node:
        return [node["const"]]
    values = node.get("enum")
    return values if isinstance(values, list) else None


def _first_missing(values: Sequence[Any], allowed: Sequence[Any]) -> Any:
    """Return the first value that is not allowed, in linear time. As in JSON Schema, 1 equals 1.0 and differs from true."""
    known = {_hashable(one) for one in allowed}
    return next((value for value in values if _hashable(value) not in known), _NONE_MISSING)


def _hashable(value: Any) -> Hashable:
    """Return a key that is equal for values that are equal in JSON."""
    if isinstance(value, bool):
        return ("boolean", value)
    if isinstance(value, dict):
        return ("object", frozenset((key, _hashable(one)) for key, one in value.items()))
    if isinstance(value, list):
        return ("array", *map(_hashable, value))
    return (value,)


def _summary(values: list[Any]) -> dict[str, Any]:
    """Return keywords that hold for all these values."""
    found: dict[str, Any] = {"type": sorted({_type_of(value) for value in values})}
    numbers = [value for value in values if _type_of(value) in ("number", "integer")]
    if numbers:
        found |= {"minimum": min(numbers), "maximum": max(numbers)}
    texts = [len(value) for value in values if isinstance(value, str)]
    if texts:
        found |= {"minLength": min(texts), "maxLength": max(texts)}
    return found


def _type_of(value: Any) -> str:
    match value:
        case None:
            return "null"
        case bool():
            return "boolean"
        case int():
            return "integer"
        case float():
            return "integer" if value.is_integer() else "number"
        case str():
            return "string"
        case list():
            return "array"
        case _:
            return "object"


def _exact(number: int | float) -> Fraction:
    return Fraction(str(number))


_AT_LEAST: Final = frozenset({"minLength", "minItems", "minProperties"})
_AT_MOST: Final = frozenset({"maxLength", "maxItems", "maxProperties"})


def _bound_gaps(ws: Conditions, reader: dict[str, Any], keyword: str, path: str) -> Iterator[str]:
    limit = reader[keyword]
    if keyword in _AT_LEAST:
        promised = max([w[keyword] for w in ws if keyword in w], default=0)
        if keyword == "minProperties":
            promised = max(promised, len({name for w in ws for name in w.get("required", ())}))
        holds = promised >= limit
    elif keyword in _AT_MOST:
        holds = any(keyword in w and w[keyword] <= limit for w in ws)
    elif keyword == "minimum":
        holds = any(w[word] >= limit for w in ws for word in ("minimum", "exclusiveMinimum") if word in w)
    elif keyword == "maximum":
        holds = any(w[word] <= limit for w in ws for word in ("maximum", "exclusiveMaximum") if word in w)
    elif keyword == "exclusiveMinimum":
        holds = any(("exclusiveMinimum" in w and w["exclusiveMinimum"] >= limit) or ("minimum" in w and w["minimum"] > limit) for w in ws)
    else:
        holds = any(("exclusiveMaximum" in w and w["exclusiveMaximum"] <= limit) or ("maximum" in w and w["maximum"] < limit) for w in ws)
    if not holds:
        yield f"{path or '/'}: {keyword} {limit} of the reader does not follow from the writer's schema"


def _item(node: dict[str, Any], index: int) -> Node:
    prefix = node.get("prefixItems", ())
    part: Node = prefix[index] if index < len(prefix) else node.get("items", True)
    return part


def _has_patterns(w: dict[str, Any], kept: Mapping[str, Any]) -> bool:
    """Return whether the condition's `additionalProperties` apply to exactly the properties that match none of these patterns."""
    return "additionalProperties" in w and w.get("patternProperties", {}).keys() == kept.keys()


def _short(value: Any) -> str:
    return repr(value)[:60]
