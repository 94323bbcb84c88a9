"""The doors the load generator can drive."""

from __future__ import annotations

from headrace.bench.doors.contract import ConsumePlan, DoorLoad
from headrace.bench.doors.figg import FiggLoad

__all__ = ["DOORS", "ConsumePlan", "DoorLoad"]

DOORS: dict[str, DoorLoad] = {load.name: load for load in (FiggLoad(),)}
