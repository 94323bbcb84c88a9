"""Regular expressions with linear matching time.

A filter comes from a peer and runs in the broker, so matching must be linear in the text for every pattern. Python's `re` backtracks; this
module does not. A pattern becomes an NFA, and the text is read once. `Pattern` caches the transitions of each state set when they are first
needed, and drops the cache when it is too large.

    literals  .  [a-z]  [^a-z]  \\d \\w \\s (and \\D \\W \\S)  \\n \\t \\r  ^  $  ( )  (?: )  |  *  +  ?  {m}  {m,}  {m,n}  (?i) in front

Matching is by bytes. Anything else (look-around, back references, \\b) raises `NotRegular`.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Final, TypeAlias

PATTERN_BYTES_MAX: Final = 512
STATES_MAX: Final = 256
"""Maximum number of states. Nested repeats multiply states."""
DEPTH_MAX: Final = 32
_SETS_MAX: Final = 1_000
_COUNT_MAX: Final = 1_000
_DRAWN_MAX: Final = 10_000
"""Maximum number of compiled nodes: repeating an empty pattern adds no state and must end too."""

Bytes: TypeAlias = int
"""Set of byte values, as 256 bits."""
_ANY: Final = (1 << 256) - 1

# Transitions of a state: on a byte of the set, to the target; without input, to the targets; or without input at one end of the text.
_ON, _FREE, _AT_START, _AT_END, _ACCEPT = range(5)


class NotRegular(ValueError):
    """The text is not a supported pattern."""


def _bits(characters: bytes) -> Bytes:
    return sum(1 << value for value in set(characters))


_DIGITS = _bits(b"0123456789")
_WORD = _DIGITS | _bits(b"abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ_")
_SPACE = _bits(b" \t\n\r\f\v")
_CLASSES: Final = {
    ord("d"): _DIGITS,
    ord("D"): _ANY ^ _DIGITS,
    ord("w"): _WORD,
    ord("W"): _ANY ^ _WORD,
    ord("s"): _SPACE,
    ord("S"): _ANY ^ _SPACE,
    ord("n"): _bits(b"\n"),
    ord("t"): _bits(b"\t"),
    ord("r"): _bits(b"\r"),
}
SPECIAL: Final = frozenset(".[^$(|*+?{\\")
"""A text without any of these matches only itself."""
_Tree: TypeAlias = tuple[Any, ...]
"""Syntax tree: ("on", set), ("then", items), ("or", branches), ("repeat", item, low, high), ("start",), ("end",)."""


class _Compiler:
    """Parses a pattern and compiles its states from the end to the front."""

    def __init__(self, pattern: bytes) -> None:
        self.fold = pattern.startswith(b"(?i)")
        self.pattern = pattern[4:] if self.fold else pattern
        self.kinds: list[int] = [_ACCEPT]
        self.sets: list[Bytes] = [0]
        self.targets: list[tuple[int, ...]] = [()]
        self.drawn = 0

    def compile(self) -> int:
        """Return the initial state."""
        tree, end = self._alternatives(0, 0)
        if end != len(self.pattern):
            raise NotRegular("unmatched )")
        return self._draw(tree, 0)

    # Parsing.

    def _alternatives(self, at: int, depth: int) -> tuple[_Tree, int]:
        if depth > DEPTH_MAX:
            raise NotRegular("nested too deeply")
        branches: list[_Tree] = []
        while True:
            branch, at = self._sequence(at, depth)
            branches.append(branch)
            if self.pattern[at : at + 1] != b"|":
                return ("or", branches), at
            at += 1

    def _sequence(self, at: int, depth: int) -> tuple[_Tree, int]:
        items: list[_Tree] = []
        while at < len(self.pattern) and self.pattern[at] not in b"|)":
            item, at = self._item(at, depth)
            item, at = self._repeats(item, at)
            items.append(item)
        return ("then", items), at

    def _item(self, at: int, depth: int) -> tuple[_Tree, int]:
        letter = self.pattern[at]
        if letter == ord("("):
            begin = at + 3 if self.pattern.startswith(b"(?:", at) else at + 1
            if self.pattern[begin : begin + 1] == b"?":
                raise NotRegular("(? is not spoken here")
            tree, end = self._alternatives(begin, depth + 1)
            if self.pattern[end : end + 1] != b")":
                raise NotRegular("unmatched (")
            return tree, end + 1
        if letter == ord("["):
            return self._class(at + 1)
        if letter == ord("\\"):
            return ("on", self._fold(self._escape(at + 1))), at + 2
        if letter in b"^$":
            return ("start" if letter == ord("^") else "end",), at + 1
        if letter in b"*+?{":
            raise NotRegular("nothing to repeat")
        return ("on", _ANY ^ _bits(b"\n") if letter == ord(".") else self._fold(1 << letter)), at + 1

    def _escape(self, at: int) -> Bytes:
        if at >= len(self.pattern):
            raise NotRegular("ends with a backslash")
        letter = self.pattern[at]
        if letter in _CLASSES:
            return _CLASSES[letter]
        if chr(letter).isalnum():
            raise NotRegular(f"\\{chr(letter)} is not spoken here")
        return 1 << letter

    def _class(self, at: int) -> tuple[_Tree, int]:
        pattern = self.pattern
        negated = pattern[at : at + 1] == b"^"
        at += negated
        found, first = 0, True
        while at < len(pattern) and (pattern[at] != ord("]") or first):
            first = False
            if pattern[at] >= 0x80:
                raise NotRegular("a class holds single bytes")
            if pattern[at] == ord("\\"):
                low, at = self._escape(at + 1), at + 2
            else:
                low, at = 1 << pattern[at], at + 1
            if pattern[at : at + 1] == b"-" and at + 1 < len(pattern) and pattern[at + 1] not in b"]\\" and low.bit_count() == 1:
                high = 1 << pattern[at + 1]
                if high < low:
                    raise NotRegular("a range that ends before it begins")
                low, at = (high << 1) - low, at + 2
            found |= low
        if at >= len(pattern):
            raise NotRegular("unmatched [")
        found = self._fold(found)
        return ("on", _ANY ^ found if negated else found), at + 1

    def _fold(self, found: Bytes) -> Bytes:
        """Add the other case of each letter for (?i). The two cases differ by 32."""
        if not self.fold:
            return found
        upper = found & _bits(b"ABCDEFGHIJKLMNOPQRSTUVWXYZ")
        lower = found & _bits(b"abcdefghijklmnopqrstuvwxyz")
        return found | upper << 32 | lower >> 32

    def _repeats(self, item: _Tree, at: int) -> tuple[_Tree, int]:
        pattern = self.pattern
        if at >= len(pattern) or pattern[at] not in b"*+?{":
            return item, at
        if item[0] in ("start", "end"):
            raise NotRegular("nothing to repeat")
        if pattern[at] == ord("{"):
            low, high, at = self._counts(at)
        else:
            low, high = {ord("*"): (0, None), ord("+"): (1, None), ord("?"): (0, 1)}[pattern[at]]
            at += 1
        # Greediness affects captures only, not whether the pattern matches.
        at += pattern[at : at + 1] == b"?"
        if at < len(pattern) and pattern[at] in b"*+?{":
            raise NotRegular("a repeat of a repeat")
        return ("repeat", item, low, high), at

    def _counts(self, at: int) -> tuple[int, int | None, int]:
        end = self.pattern.find(b"}", at)
        least, comma, most = self.pattern[at + 1 : max(end, at)].partition(b",")
        if not least.isdigit() or not (most.isdigit() or not most):
            raise NotRegular("{ wants numbers")
        low = int(least)
        high = int(most) if most else None if comma else low
        if low > _COUNT_MAX or (high is not None and not low <= high <= _COUNT_MAX):
            raise NotRegular("{ wants small numbers in order")
        return low, high, end + 1

    # Compiling.

    def _add(self, kind: int, found: Bytes, *targets: int) -> int:
        if len(self.kinds) >= STATES_MAX:
            raise NotRegular("too many states")
        self.kinds.append(kind)
        self.sets.append(found)
        self.targets.append(targets)
        return len(self.kinds) - 1

    def _draw(self, tree: _Tree, then: int) -> int:
        """Return the state from which the tree leads to `then`."""
        self.drawn += 1
        if self.drawn > _DRAWN_MAX:
            raise NotRegular("too many nodes")
        match tree:
            case ("on", found):
                return self._add(_ON, found, then)
            case ("then", items):
                for item in reversed(items):
                    then = self._draw(item, then)
                return then
            case ("or", branches):
                begins = [self._draw(branch, then) for branch in branches]
                return begins[0] if len(begins) == 1 else self._add(_FREE, 0, *begins)
            case ("repeat", item, low, high):
                return self._draw_repeat(item, low, high, then)
            case (end,):
                return self._add(_AT_START if end == "start" else _AT_END, 0, then)
        raise AssertionError(tree)

    def _draw_repeat(self, item: _Tree, low: int, high: int | None, then: int) -> int:
        if high is None:
            turn = self._add(_FREE, 0, then)
            self.targets[turn] = (self._draw(item, turn), then)
            then = turn
        else:
            behind = then
            for _ in range(high - low):
                then = self._add(_FREE, 0, self._draw(item, then), behind)
        for _ in range(low):
            then = self._draw(item, then)
        return then


class Pattern:
    """A compiled pattern. Raises `NotRegular`."""

    def __init__(self, text: str) -> None:
        encoded = text.encode()
        if len(encoded) > PATTERN_BYTES_MAX:
            raise NotRegular("too long")
        compiler = _Compiler(encoded)
        self._start = compiler.compile()
        self._kinds, self._byte_sets, self._targets = compiler.kinds, compiler.sets, compiler.targets
        self._forget()

    def search(self, text: bytes) -> bool:
        """Return whether the pattern matches anywhere in the text."""
        at = self._entry
        if at is None:
            return True
        for byte in text:
            ahead = self._arrows[at].get(byte)
            if ahead is None:
                ahead = self._walk(at, byte)
                if ahead is None:
                    return True
            at = ahead
        return 0 in self._follow(self._sets[at], at_end=True)

    def _forget(self) -> None:
        self._numbers: dict[frozenset[int], int] = {}
        self._sets: list[frozenset[int]] = []
        self._arrows: list[dict[int, int]] = []
        """Transitions of each state set, by byte. A byte that completes a match has no entry."""
        self._entry = self._number(self._follow((self._start,), at_start=True))
        self._fresh = self._follow((self._start,))

    def _number(self, states: frozenset[int]) -> int | None:
        """Return the number of the set, or None if it accepts."""
        if 0 in states:
            return None
        number = self._numbers.get(states)
        if number is None:
            number = self._numbers[states] = len(self._sets)
            self._sets.append(states)
            self._arrows.append({})
        return number

    def _walk(self, at: int, byte: int) -> int | None:
        here = self._sets[at]
        bit = 1 << byte
        reached = [self._targets[state][0] for state in here if self._kinds[state] == _ON and self._byte_sets[state] & bit]
        ahead = self._follow(reached) | self._fresh
        if len(self._sets) >= _SETS_MAX:
            self._forget()
            return self._number(ahead)
        number = self._number(ahead)
        if number is not None:
            self._arrows[at][byte] = number
        return number

    def _follow(self, states: Iterable[int], *, at_start: bool = False, at_end: bool = False) -> frozenset[int]:
        """Return the states reachable without input that wait for a byte, wait for the end, or accept."""
        seen: set[int] = set()
        pending = list(states)
        while pending:
            state = pending.pop()
            if state in seen:
                continue
            seen.add(state)
            kind = self._kinds[state]
            if kind == _FREE or (kind == _AT_START and at_start) or (kind == _AT_END and at_end):
                pending += self._targets[state]
        return frozenset(state for state in seen if self._kinds[state] in (_ON, _AT_END, _ACCEPT))
