"""Mistakes planted into the flush of a single record (`storage/lone.py`), added to those of `bugs.py`."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from headrace.records import Ack, Appended, RecordBatch
from headrace.storage import lone, store
from headrace.storage.batch import Built
from headrace.storage.encoding import build_plain
from headrace.storage.partition import Partition
from headrace.storage.staged import AnyStaged, Staged
from headrace.storage.store import Store
from tests.storage.crash.bugs import PLANTS, plant

__all__ = ["PLANTS"]


@plant("a lone append is acknowledged before the sync")
def _(patch: pytest.MonkeyPatch) -> None:
    whole = lone.write_lone

    def hasty(self: Store, staged: list[AnyStaged]) -> bool:
        item = staged[0]
        if len(staged) == 1 and isinstance(item, Staged) and len(item.appends) == 1 and item.ack is Ack.DURABLE:
            log, batch = item.appends[0]
            if isinstance(batch, RecordBatch) and len(batch) == 1 and batch.timestamps is None and log in self.partitions:
                self.deliver([(item.done, [Appended(self.partitions[log].next, len(batch), item.now)])], [log])
                item.done = lambda outcome: None
        return whole(self, staged)

    patch.setattr(store, "write_lone", hasty)


@plant("readers see a lone append before the sync")
def _(patch: pytest.MonkeyPatch) -> None:
    whole, build, push = lone.write_lone, build_plain, Partition.push
    stores: list[Store] = []
    shown: list[Built] = []

    def noted(self: Store, staged: list[AnyStaged]) -> bool:
        stores.append(self)
        return whole(self, staged)

    def eager(log: int, base_offset: int, values: Sequence[bytes], now: int) -> Built:
        shown.append(build(log, base_offset, values, now))
        partition = stores[-1].partitions[log]
        partition.next = base_offset + len(values)
        push(partition, shown[-1:])
        return shown[-1]

    def once(self: Partition, batches: list[Built]) -> int:
        return batches[0][0].size if any(batches[0] is early for early in shown) else push(self, batches)

    patch.setattr(store, "write_lone", noted)
    patch.setattr(lone, "build_plain", eager)
    patch.setattr(Partition, "push", once)
