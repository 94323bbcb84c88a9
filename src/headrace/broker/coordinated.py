"""Base of the operations that only the coordinator can do."""

from __future__ import annotations

from headrace.engine.contract import Engine
from headrace.errors import NotCoordinator


class Coordinated:
    """Part of `Broker`."""

    _engine: Engine
    _is_coordinator: bool

    @property
    def is_coordinator(self) -> bool:
        """Whether this broker serves the operations that need the owner of the tables."""
        return self._is_coordinator

    def check_coordinator(self) -> None:
        """Raises `NotCoordinator`."""
        if not self._is_coordinator:
            raise NotCoordinator(self._engine.ownership.coordinator)
