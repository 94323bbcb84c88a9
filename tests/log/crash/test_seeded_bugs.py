"""Planted bugs: each classic mistake of a log, planted by a test, must be caught by the crash harness."""
