"""Disk images that a power cut may leave.

`PowerCuts` walks the history of a `SimulatedFiles` and, after any number of its operations, lists the legal images:

    contents   synced data, plus of the unsynced operations: none, all, each prefix, all but one, one alone, and the last write
               torn (at sectors and at odd bytes, some sectors only), zeroed, turned into garbage, or showing the earlier
               content of the blocks
    names      entries that no `sync_dir` covered yet: lost, kept, each prefix, all but one

Each cut tears the last write. Earlier writes were torn at earlier cuts, in the same state of the disk.

The durable state advances with the walk, so that images of successive cuts are cheap, and images share equal bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Final, NamedTuple, Protocol

from tests.storage_faults.simulated import Operation, SimulatedFiles, parent

SECTOR_BYTES: Final = 512
"""A disk writes a sector completely or not at all; a larger write may be torn."""
_SAMPLED_MAX: Final = 8
"""Number of images drawn from a long family (prefixes, drops, torn cuts)."""


class Dice(Protocol):
    """The methods of `random.Random` used here. The caller provides the generator."""

    def randrange(self, start: int, stop: int, /) -> int: ...

    def randbytes(self, n: int, /) -> bytes: ...


class _Pending(NamedTuple):
    number: int
    operation: Operation


class _Names(NamedTuple):
    label: str
    files: Mapping[str, int]
    directories: frozenset[str]
    whole: bool
    """Whether to combine these names with all content variants, or only with none and all."""


def apply(content: bytes, operations: Sequence[Operation]) -> bytes:
    """Return the content after these writes, truncations and allocations."""
    if not operations:
        return content
    changed = bytearray(content)
    for operation in operations:
        position = operation.position
        if operation.kind == "write":
            if position > len(changed):
                changed.extend(bytes(position - len(changed)))
            changed[position : position + len(operation.data)] = operation.data
        elif position > len(changed):
            changed.extend(bytes(position - len(changed)))
        elif operation.kind == "truncate":
            del changed[position:]
    return bytes(changed)


class _Disk:
    """Durable state and pending operations at one point of the history."""

    def __init__(self, files: SimulatedFiles) -> None:
        self.index = 0
        self.marks = 0
        self.names = {path: inode for path, (inode, _) in files.initial.items()}
        self.directories = set(files.initial_directories)
        self.contents = {inode: content for inode, content in files.initial.values()}
        self.pending: dict[int, list[_Pending]] = {}
        self.entries: list[Operation] = []
        self._dropped: set[int] = set()
        """Numbers of operations whose sync failed. No later sync makes them durable, because the kernel has dropped the pages."""

    def step(self, operation: Operation) -> None:
        kind = operation.kind
        if kind in ("write", "truncate", "allocate"):
            self.pending.setdefault(operation.inode, []).append(_Pending(self.index, operation))
        elif kind == "sync":
            self._sync(operation.inode)
        elif kind == "sync_failed":
            self._dropped.update(pending.number for pending in self.pending.get(operation.inode, ()))
        elif kind == "sync_dir":
            self._sync_dir(operation.path)
        elif kind == "mark":
            self.marks += 1
        elif kind != "sync_dir_failed":
            if kind == "create":
                self.contents[operation.inode] = b""
            self.entries.append(operation)
        self.index += 1

    def _sync(self, inode: int) -> None:
        waiting = self.pending.pop(inode, [])
        durable = [pending.operation for pending in waiting if pending.number not in self._dropped]
        self.contents[inode] = apply(self.contents[inode], durable)
        dropped = [pending for pending in waiting if pending.number in self._dropped]
        still = [pending for pending in dropped if not any(_overlap(pending.operation, other) for other in durable)]
        if still:
            self.pending[inode] = still

    def _sync_dir(self, directory: str) -> None:
        kept = []
        for entry in self.entries:
            if directory in (parent(entry.path), parent(entry.target or entry.path)):
                _enter(entry, self.names, self.directories)
            else:
                kept.append(entry)
        self.entries = kept


def _overlap(one: Operation, other: Operation) -> bool:
    if one.kind != "write" or other.kind != "write":
        return False
    return one.position < other.position + len(other.data) and other.position < one.position + len(one.data)


def _enter(entry: Operation, names: dict[str, int], directories: set[str]) -> None:
    """Make one directory entry durable."""
    if entry.kind == "create":
        names[entry.path] = entry.inode
    elif entry.kind == "remove":
        names.pop(entry.path, None)
    elif entry.kind == "rename":
        names.pop(entry.path, None)
        names[entry.target] = entry.inode
    elif entry.kind == "make_dir":
        directories.add(entry.path)
    else:
        directories.discard(entry.path)


class PowerCuts:
    """Images of one history, without duplicates for the same acknowledgements."""

    def __init__(self, files: SimulatedFiles) -> None:
        self._files = files
        self._disk = _Disk(files)
        self._seen: set[tuple[int, int]] = set()

    def images(self, upto: int, dice: Dice) -> Iterator[tuple[str, SimulatedFiles]]:
        """Yield (label, disk) for a cut after `operations[:upto]`. Cheap if `upto` only grows."""
        operations = self._files.operations
        assert 0 <= upto <= len(operations)
        if upto < self._disk.index:
            self._disk = _Disk(self._files)
        for operation in operations[self._disk.index : upto]:
            self._disk.step(operation)
        disk = self._disk
        for names in _name_variants(disk):
            visible = set(names.files.values())
            waiting = [pending for inode in sorted(visible & disk.pending.keys()) for pending in disk.pending[inode]]
            for label, changed in _content_variants(disk, sorted(waiting), names.whole, upto - 1, dice):
                image = _build(disk, names, changed)
                key = (disk.marks, hash(frozenset(image.items())))
                if key not in self._seen:
                    self._seen.add(key)
                    yield f"cut {upto}, {names.label}, {label}", SimulatedFiles(image, names.directories)


def barest(files: SimulatedFiles) -> SimulatedFiles:
    """Return the disk with only the synced data."""
    disk = _Disk(files)
    for operation in files.operations:
        disk.step(operation)
    names = _Names("", disk.names, frozenset(disk.directories), False)
    return SimulatedFiles(_build(disk, names, {}), names.directories)


def _build(disk: _Disk, names: _Names, changed: Mapping[int, bytes]) -> dict[str, bytes]:
    """Remove files whose directory is missing."""
    return {
        path: changed[inode] if inode in changed else disk.contents[inode]
        for path, inode in names.files.items()
        if parent(path) in names.directories
    }


def _sample(count: int) -> Sequence[int]:
    """Return indexes below `count`, all of them or evenly drawn."""
    if count <= _SAMPLED_MAX:
        return range(count)
    return sorted({step * (count - 1) // (_SAMPLED_MAX - 1) for step in range(_SAMPLED_MAX)})


def _name_variants(disk: _Disk) -> Iterator[_Names]:
    entries = disk.entries

    def entered(label: str, chosen: Sequence[Operation], *, whole: bool) -> _Names:
        names, directories = dict(disk.names), set(disk.directories)
        for entry in chosen:
            _enter(entry, names, directories)
        return _Names(label, names, frozenset(directories), whole)

    if not entries:
        yield _Names("names durable", disk.names, frozenset(disk.directories), True)
        return
    yield entered("names lost", (), whole=True)
    yield entered("names kept", entries, whole=True)
    for index in _sample(len(entries)):
        if index > 0:
            yield entered(f"names up to entry {index}", entries[:index], whole=False)
        if len(entries) > 1:
            yield entered(f"names without entry {index}", [*entries[:index], *entries[index + 1 :]], whole=False)


def _content_variants(disk: _Disk, waiting: list[_Pending], whole: bool, last: int, dice: Dice) -> Iterator[tuple[str, dict[int, bytes]]]:
    yield "nothing", {}
    if not waiting:
        return
    everything = _landed(disk, waiting)
    yield "everything", everything
    if not whole:
        return
    count = len(waiting)
    for index in _sample(count):
        if index > 0:
            yield f"first {index} of {count}", _landed(disk, waiting[:index])
        if count > 1:
            yield f"all but {index} of {count}", _landed(disk, [*waiting[:index], *waiting[index + 1 :]])
            yield f"only {index} of {count}", _landed(disk, waiting[index : index + 1])
    newest = waiting[-1]
    if newest.number == last and newest.operation.kind == "write":
        inode = newest.operation.inode
        before = apply(disk.contents[inode], [pending.operation for pending in waiting[:-1] if pending.operation.inode == inode])
        for label, content in _torn(before, newest.operation, disk, dice):
            yield f"{newest.operation.path} {label}", {**everything, inode: content}


def _landed(disk: _Disk, operations: Sequence[_Pending]) -> dict[int, bytes]:
    grouped: dict[int, list[Operation]] = {}
    for pending in operations:
        grouped.setdefault(pending.operation.inode, []).append(pending.operation)
    return {inode: apply(disk.contents[inode], mine) for inode, mine in grouped.items()}


def _torn(before: bytes, write: Operation, disk: _Disk, dice: Dice) -> Iterator[tuple[str, bytes]]:
    """Yield variants of a partly written last write."""
    size, position = len(write.data), write.position

    def put(data: bytes, at: int = position) -> bytes:
        return apply(before, [write._replace(position=at, data=data)])

    def filled(fill: Callable[[int], bytes], cut: int) -> bytes:
        return put(write.data[:cut] + fill(size - cut))

    first = SECTOR_BYTES - position % SECTOR_BYTES
    sectors = range(first, size, SECTOR_BYTES)
    cuts = [sectors[index] for index in _sample(len(sectors))]
    odd = sorted({dice.randrange(1, size) for _ in range(3)}) if size > 1 else []
    for cut in cuts:
        yield f"torn at {cut} of {size}", put(write.data[:cut])
        yield f"torn at {cut} of {size}, its end first", put(write.data[cut:], position + cut)
    for cut in odd:
        yield f"torn at {cut} of {size}", put(write.data[:cut])
        yield f"zero from {cut} of {size}", filled(bytes, cut)
        yield f"garbage from {cut} of {size}", filled(dice.randbytes, cut)
    yield f"{size} bytes of zeros", filled(bytes, 0)
    yield f"{size} bytes of garbage", filled(dice.randbytes, 0)
    yield f"{size} stale bytes", put(_stale(before, write, disk, dice))
    if len(cuts) > 1:
        yield "some sectors", _some_sectors(before, write, [0, *sectors, size], dice)


def _stale(before: bytes, write: Operation, disk: _Disk, dice: Dice) -> bytes:
    """Yield contents in which allocated but unwritten blocks show old data: whole sectors of this or another file, so that valid
    checksums appear in the wrong place."""
    size = len(write.data)
    sources = [before, *(content for content in disk.contents.values() if content)]
    source = sources[dice.randrange(0, len(sources))]
    start = dice.randrange(0, len(source) // SECTOR_BYTES + 1) * SECTOR_BYTES
    return (source[start : start + size] + bytes(size))[:size]


def _some_sectors(before: bytes, write: Operation, bounds: Sequence[int], dice: Dice) -> bytes:
    kept = [(start, stop) for start, stop in pairwise(bounds) if dice.randrange(0, 2)]
    return apply(before, [write._replace(position=write.position + start, data=write.data[start:stop]) for start, stop in kept])
