"""The doors the load generator can drive."""

from __future__ import annotations

from headrace.bench.doors.blipmq import BlipMqLoad
from headrace.bench.doors.contract import ConsumePlan, DoorLoad
from headrace.bench.doors.figg import FiggLoad
from headrace.bench.doors.flymq import FlyMqLoad
from headrace.bench.doors.rustlog import RustLogLoad
from headrace.wire.rustlog import Dialect

__all__ = ["DOORS", "ConsumePlan", "DoorLoad"]

_LOADS: tuple[DoorLoad, ...] = (FiggLoad(), BlipMqLoad(), FlyMqLoad(), RustLogLoad(Dialect.BINARY), RustLogLoad(Dialect.JSON))
DOORS: dict[str, DoorLoad] = {load.name: load for load in _LOADS}
