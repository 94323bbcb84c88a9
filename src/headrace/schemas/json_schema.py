"""JSON Schema, draft 2020-12, compiled by jsonschema-rs, which matches patterns in linear time and is configured to fetch nothing.

msgspec decodes a value and the compiled schema validates it, in about a microsecond per hundred bytes. `format` is an annotation, which is
the default of the draft.

Cost estimate for validating a JSON value.

A validator evaluates every part of the schema that applies to a location in the value. `steps_per_place` is an upper bound for one location
of any value: the parts joined in place (`allOf`, `anyOf`, `$ref`, …) and those with the same property name or index. A value of N bytes has
fewer than N locations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import islice
from typing import Any, Final

import jsonschema_rs
import msgspec

from headrace.errors import InvalidSchema
from headrace.limits import JSON_VALUE_DEPTH_MAX, KIB, MIB, SCHEMA_FAULTS_MAX
from headrace.schemas.contract import Schema, SchemaType, present
from headrace.schemas.json_comparison import Comparison
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


_PATTERN_BYTES_MAX: Final = 256 * KIB
"""Maximum size of a compiled pattern, because nested repetitions grow without limit."""
_FAULT_CHARACTERS_MAX: Final = 200
_ERRORS_MAX: Final = 4_096
"""The library builds all errors before it returns the first. If there may be more than this, only the first is requested."""
_ERROR_BYTES_MAX: Final = 16 * MIB
"""The same for the size of all errors. Each holds a copy of the wrong part of the value and of the allowed values."""
_ALTERNATIVES: Final = ("anyOf", "oneOf", "contains", "if", "not")
"""Keywords whose first error already holds all errors of their branches."""
_DECODING_STEPS: Final = 4
_DOES_NOT_FIT: Final = "/: the value does not fit the schema; it is too large to say where"
_TOO_DEEP: Final = "invalid JSON message: nested too deeply"

_decode: Callable[[bytes], Any] = msgspec.json.Decoder().decode


def _decode_value(value: bytes) -> Any:
    """Decode a value. Raises `RecursionError` for one nested deeper than `JSON_VALUE_DEPTH_MAX`, whatever the parser allows."""
    plain = _decode(value)
    # Most values have fewer brackets than allowed levels, and counting brackets is cheap.
    if value.count(b"{") + value.count(b"[") > JSON_VALUE_DEPTH_MAX and _is_too_deep(plain):
        raise RecursionError
    return plain


def _is_too_deep(plain: Any) -> bool:
    level = [plain] if isinstance(plain, dict | list) else []
    for _ in range(JSON_VALUE_DEPTH_MAX):
        level = [
            inner for outer in level for inner in (outer.values() if isinstance(outer, dict) else outer) if isinstance(inner, dict | list)
        ]
        if not level:
            return False
    return True


class JsonSchema:
    """Compiled JSON Schema. The constructor raises `InvalidSchema`."""

    type = SchemaType.JSON

    def __init__(self, definition: bytes) -> None:
        try:
            plain = _decode(definition)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise InvalidSchema(f"the schema is not JSON: {error}") from error
        except RecursionError as error:
            raise InvalidSchema("the schema is nested too deeply") from error
        self.definition = definition
        self.document = Document(plain)
        self._steps_per_place = steps_per_place(self.document)
        self.steps_per_byte = _DECODING_STEPS + self._steps_per_place
        self._has_alternatives = any(word in part for part in self.document.parts for word in _ALTERNATIVES)
        options = jsonschema_rs.RegexOptions(size_limit=_PATTERN_BYTES_MAX, dfa_size_limit=_PATTERN_BYTES_MAX)
        try:
            self._validator = jsonschema_rs.Draft202012Validator(plain, pattern_options=options, offline=True)
        except (jsonschema_rs.ValidationError, jsonschema_rs.ReferencingError, ValueError) as error:
            raise InvalidSchema(f"not a JSON Schema of draft 2020-12: {_first_line(error)}") from error
        self._is_valid: Callable[[Any], bool] = self._validator.is_valid

    def accepts(self, values: Sequence[bytes | None]) -> bool:
        try:
            return all(map(self._is_valid, map(_decode_value, present(values))))
        except (msgspec.DecodeError, RecursionError, ValueError):
            return False

    def faults(self, value: bytes) -> list[str]:
        try:
            plain = _decode_value(value)
        except RecursionError:
            return [_TOO_DEEP]
        except (msgspec.DecodeError, ValueError) as error:
            return [f"invalid JSON message: {error}"]
        if self._is_valid(plain):
            return []
        errors_max = len(value) * self._steps_per_place
        if errors_max <= _ERRORS_MAX and errors_max * (len(value) + len(self.definition)) <= _ERROR_BYTES_MAX:
            return [_words(fault) for fault in islice(self._validator.iter_errors(plain), SCHEMA_FAULTS_MAX)]
        if self._has_alternatives:
            return [_DOES_NOT_FIT]
        try:
            self._validator.validate(plain)
        except jsonschema_rs.ValidationError as fault:
            return [_words(fault)]
        raise AssertionError("a value that is not valid has an error")

    def conflicts(self, written: Schema) -> list[str]:
        assert isinstance(written, JsonSchema)
        return Comparison(written.document, self.document).conflicts()


def _words(fault: jsonschema_rs.ValidationError) -> str:
    place = "".join(f"/{step}" for step in fault.instance_path)
    return f"{place or '/'}: {fault.message}"[:_FAULT_CHARACTERS_MAX]


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:_FAULT_CHARACTERS_MAX]
