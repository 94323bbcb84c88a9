"""Optional libraries, the extras that install them, and the error for a missing one.

    with needs("headrace.arrow", "pyarrow"):
        import pyarrow as pa

`needs` checks the libraries it names before its block begins, so that a long command fails at once and names every missing extra. It
reports an import that fails later in the block the same way if the table below has its library. It is also a decorator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from typing import Final, NamedTuple

from headrace.errors import ConfigError


class Library(NamedTuple):
    """Display name of a library, and the extra that installs it."""

    title: str
    extra: str


LIBRARIES: Final[Mapping[str, Library]] = {
    "pyarrow": Library("Arrow", "flight"),
    "numpy": Library("NumPy", "flight"),
    "pyspark": Library("Spark", "spark"),
    "py4j": Library("Spark", "spark"),
    "pandas": Library("pandas", "spark"),
    "deltalake": Library("Delta Lake", "tables"),
    "pyiceberg": Library("Iceberg", "tables"),
    "aioquic": Library("aioquic", "quic"),
    "OpenSSL": Library("pyOpenSSL", "quic"),
    "fastavro": Library("fastavro", "schemas"),
    "google.protobuf": Library("protobuf", "schemas"),
    "jsonschema_rs": Library("jsonschema-rs", "schemas"),
    "aiokafka": Library("aiokafka", "kafka"),
    "prometheus_client": Library("prometheus-client", "metrics"),
    "opentelemetry": Library("OpenTelemetry", "otel"),
    "starlette": Library("Starlette", "console"),
    "uvicorn": Library("uvicorn", "console"),
    "jinja2": Library("Jinja", "console"),
    "markupsafe": Library("MarkupSafe", "console"),
    "multipart": Library("python-multipart", "console"),
    "hdrh": Library("hdrhistogram", "bench"),
    "nats": Library("nats-py", "bench"),
}
"""Optional libraries by import name. If several libraries of one extra are missing, the message names the first."""

_INCLUDED: Final[Mapping[str, frozenset[str]]] = {"spark": frozenset({"flight", "schemas"})}
"""Extras that an extra includes."""


class MissingExtra(ConfigError, ImportError):
    """An optional library is not installed. The message is one line that ends with the command to install it."""

    def __init__(self, needed_by: str, libraries: Iterable[str]) -> None:
        absent = sorted(set(libraries), key=list(LIBRARIES).index)
        extras = {LIBRARIES[name].extra for name in absent}
        for extra in tuple(extras):
            extras -= _INCLUDED.get(extra, frozenset())
        titles: dict[str, str] = {}
        for name in absent:
            if LIBRARIES[name].extra in extras:
                titles.setdefault(LIBRARIES[name].extra, LIBRARIES[name].title)
        *others, last = titles.values()
        named = f"{', '.join(others)} and {last}" if others else last
        super().__init__(f"{needed_by} needs {named}: pip install 'headrace[{','.join(sorted(extras))}]'")
        self.name = absent[0]


@contextmanager
def needs(needed_by: str, *libraries: str) -> Iterator[None]:
    """Raise `MissingExtra` if a named library is not installed, or if the block fails to import one of the table."""
    absent = [name for name in libraries if not _is_installed(name)]
    if absent:
        raise MissingExtra(needed_by, absent)
    try:
        yield
    except ImportError as failure:
        raise explained(failure, needed_by) from failure.__cause__


def explained(failure: ImportError, needed_by: str) -> ImportError:
    """Return `MissingExtra` if the failed import is an optional library, else the failure itself."""
    parts = (failure.name or "").split(".")
    absent = [name for length in (1, 2) if (name := ".".join(parts[:length])) in LIBRARIES]
    return failure if isinstance(failure, MissingExtra) or not absent else MissingExtra(needed_by, absent)


def _is_installed(library: str) -> bool:
    try:
        return find_spec(library) is not None
    except ImportError:
        # The parent package is missing too, or an import hook raises.
        return False
    except ValueError:
        # A module in `sys.modules` without a specification exists.
        return True
