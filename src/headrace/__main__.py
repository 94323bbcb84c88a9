"""Entry point of `python -m headrace`."""

from __future__ import annotations

from headrace.cli import main

main()
