"""Worker process for expensive schema checks, which the broker can limit and kill.

    python -m headrace.schemas.worker

Each request on stdin has one reply on stdout; both are a length (u32, big-endian) and MessagePack. The process limits its memory, and its
CPU time for each job: the kernel ends the process when a job exceeds it (SIGXCPU). It ends when stdin ends, so it does not outlive its
broker.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import sys
from typing import BinaryIO, Final

import msgspec

from headrace.errors import InvalidSchema
from headrace.limits import SCHEMA_CHECK_CPU_SECONDS_MAX, SCHEMA_CHECK_MEMORY_BYTES_MAX
from headrace.schemas import compile_schema, conflicts
from headrace.schemas.contract import Compatibility, Schema, SchemaType

LENGTH: Final = struct.Struct(">I")
OUT_OF_MEMORY: Final = f"/: checking takes more than {SCHEMA_CHECK_MEMORY_BYTES_MAX} bytes of memory"
_COMPILED_MAX: Final = 8


class Job(msgspec.Struct, frozen=True):
    """Request: validate the values; or with `mode`, compile the definition and compare it with `old`, if given."""

    type: SchemaType
    definition: bytes
    values: list[bytes] = []
    old: tuple[SchemaType, bytes] | None = None
    mode: Compatibility | None = None


class Verdict(msgspec.Struct, frozen=True):
    """Reply: `faults` of each value, or the conflicts. `invalid` is the reason why the definition is not a schema."""

    faults: list[list[str]] = []
    invalid: str = ""
    cpu_ms: int = 0


def answer(job: Job, compiled: dict[tuple[SchemaType, bytes], Schema]) -> Verdict:
    """Run the job. `compiled` caches the latest schemas."""
    before = _cpu_seconds()
    try:
        schema = _schema(job.type, job.definition, compiled)
        if job.mode is None:
            return Verdict([_faults(schema, value) for value in job.values])
        cpu_ms = int((_cpu_seconds() - before) * 1000)
        found = [] if job.old is None else conflicts(_schema(*job.old, compiled), schema, job.mode)
    except InvalidSchema as error:
        return Verdict(invalid=str(error))
    except MemoryError:
        return Verdict([[OUT_OF_MEMORY]] * max(1, len(job.values)), invalid=OUT_OF_MEMORY)
    return Verdict([found], cpu_ms=cpu_ms)


def _faults(schema: Schema, value: bytes) -> list[str]:
    try:
        return schema.faults(value)
    except MemoryError:
        return [OUT_OF_MEMORY]


def _schema(type: SchemaType, definition: bytes, compiled: dict[tuple[SchemaType, bytes], Schema]) -> Schema:
    known = compiled.get((type, definition))
    if known is None:
        known = compile_schema(type, definition)
        if len(compiled) >= _COMPILED_MAX:
            del compiled[next(iter(compiled))]
        compiled[type, definition] = known
    return known


def _cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def _limit_memory() -> None:
    _, hard = resource.getrlimit(resource.RLIMIT_AS)
    limit = SCHEMA_CHECK_MEMORY_BYTES_MAX if hard == resource.RLIM_INFINITY else min(hard, SCHEMA_CHECK_MEMORY_BYTES_MAX)
    resource.setrlimit(resource.RLIMIT_AS, (limit, hard))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _limit_time() -> None:
    """Set the CPU limit of the job. It counts whole seconds from the start of the process, so the job has at least its limit."""
    _, hard = resource.getrlimit(resource.RLIMIT_CPU)
    wanted = int(_cpu_seconds()) + 1 + SCHEMA_CHECK_CPU_SECONDS_MAX
    resource.setrlimit(resource.RLIMIT_CPU, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def serve(requests: BinaryIO, replies: BinaryIO) -> None:
    """Reply to requests until stdin ends."""
    compiled: dict[tuple[SchemaType, bytes], Schema] = {}
    decoder = msgspec.msgpack.Decoder(Job)
    while head := requests.read(LENGTH.size):
        job = decoder.decode(requests.read(LENGTH.unpack(head)[0]))
        _limit_time()
        reply = msgspec.msgpack.encode(answer(job, compiled))
        replies.write(LENGTH.pack(len(reply)) + reply)
        replies.flush()


def main() -> None:
    with contextlib.suppress(OSError):
        os.nice(5)  # give the broker priority
    _limit_memory()
    with contextlib.suppress(KeyboardInterrupt):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
