"""Protocols of the load generator."""

from __future__ import annotations

from headrace.bench.protocols.blipmq import BlipMqLoad
from headrace.bench.protocols.contract import ConsumePlan, ProtocolLoad
from headrace.bench.protocols.figg import FiggLoad
from headrace.bench.protocols.flymq import FlyMqLoad
from headrace.bench.protocols.rustlog import RustLogLoad
from headrace.wire.rustlog import Dialect

__all__ = ["PROTOCOLS", "ConsumePlan", "ProtocolLoad"]

_LOADS: tuple[ProtocolLoad, ...] = (FiggLoad(), BlipMqLoad(), FlyMqLoad(), RustLogLoad(Dialect.BINARY), RustLogLoad(Dialect.JSON))
PROTOCOLS: dict[str, ProtocolLoad] = {load.name: load for load in _LOADS}
