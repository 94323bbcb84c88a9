"""Spark looks into every module whose name begins so, and finds the format `headrace` here."""

from headrace.spark import DefaultSource

__all__ = ["DefaultSource"]
