"""One in-memory broker per module."""

from __future__ import annotations

from tests.flight.conftest import flight_client, harness, topic, wide

__all__ = ["flight_client", "harness", "topic", "wide"]
