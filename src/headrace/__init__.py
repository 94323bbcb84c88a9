"""Headrace: a durable message log that speaks several wire protocols."""

from __future__ import annotations

__version__ = "0.1.0"
