"""Modules that mypyc compiles: whether they are compiled here, and what it has to know about their classes.

`hatch_build.py` compiles them. They run as plain Python too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import headrace.columns

if TYPE_CHECKING:
    from mypy_extensions import mypyc_attr as mypyc_attr
else:
    # The library is there only where types are checked or modules compiled.
    def mypyc_attr(**attributes: object) -> Callable[[_Class], _Class]:
        """Return a decorator that leaves a class of plain Python as it is."""
        return lambda cls: cls


_Class = TypeVar("_Class")


def is_compiled() -> bool:
    """Return whether the compiled modules are in use."""
    return not str(headrace.columns.__file__).endswith(".py")
