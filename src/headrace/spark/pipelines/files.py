"""Pipeline files: a `.toml` file declares a pipeline, a `.py` file defines one called `pipeline`.

An error names the file, the key, and the line if the key is found in the file.
"""

from __future__ import annotations

import importlib
import importlib.util
import re
import sys
import tomllib
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any, Final

from headrace.errors import ConfigError, HeadraceError
from headrace.spark.pipelines.keys import InvalidKey, nearest
from headrace.spark.pipelines.model import Pipeline

_FILE_BYTES_MAX: Final = 1 << 20
_TABLES: Final = ("sources", "steps", "sinks")


def load(file: Path, **overrides: object) -> Pipeline:
    """Load and check the pipeline of a file. `overrides` replace keys of `[pipeline]`. Raises `ConfigError`."""
    if not file.is_file():
        raise ConfigError(f"{file}: no such file")
    if file.suffix == ".py":
        return _from_python(file, overrides)
    if file.suffix != ".toml":
        raise ConfigError(f"{file}: expected a .toml or a .py file")
    text = _read(file)
    try:
        return from_document(tomllib.loads(text), file, overrides)
    except tomllib.TOMLDecodeError as failure:
        raise ConfigError(f"{file}: {failure}") from None
    except InvalidKey as failure:
        line = line_of(text, failure.path)
        raise ConfigError(f"{file}{f':{line}' if line else ''}: {failure}") from None


def from_document(document: Mapping[str, Any], file: Path, overrides: Mapping[str, object] | None = None) -> Pipeline:
    """Return the pipeline of a TOML document. Raises `InvalidKey`."""
    for section in document:
        if section not in ("pipeline", *_TABLES):
            raise InvalidKey(section, f"unknown section{nearest(section, ['pipeline', *_TABLES])}")
    head = _table(document, "pipeline")
    pipeline = Pipeline(head.pop("name", file.stem), **head).at(file.parent, **(overrides or {}))
    for section, add in (("sources", pipeline.source), ("steps", pipeline.step), ("sinks", pipeline.sink)):
        for name, keys in _table(document, section).items():
            if not isinstance(keys, Mapping):
                raise InvalidKey(f"{section}.{name}", f"expected a section [{section}.NAME]")
            add(name, **keys)
    pipeline.check()
    return pipeline


def line_of(text: str, path: str) -> int | None:
    """Return the line of a key such as `sources.orders.format`, or of its section; None if neither is found."""
    parts = path.split(".")
    section, best = "", None
    for number, line in enumerate(text.splitlines(), 1):
        if header := re.match(r"\s*\[([^\[\]]+)\]", line):
            section = re.sub(r"[\s\"']", "", header[1])
            if path == section or path.startswith(section + "."):
                best = number
        elif section and path.startswith(section + "."):
            key = parts[len(section.split("."))]
            if re.match(rf"\s*[\"']?{re.escape(key)}[\"']?\s*[.=]", line):
                return number
    return best


def module_at(file: Path, name: str) -> ModuleType:
    """Import a file as a module, pickled by value, because the executors do not have the file."""
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None and spec.loader is not None, f"{file} has no loader"
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return pickle_by_value(module)


def module_beside(directory: Path, name: str) -> ModuleType:
    """Import an installed module, or one in this directory, which is then pickled by value."""
    if str(directory) not in sys.path:
        sys.path.insert(0, str(directory))
    path = directory.joinpath(*name.split(".")).with_suffix(".py")
    cached = sys.modules.get(name)
    if path.is_file() and cached is not None and cached.__file__ != str(path):
        del sys.modules[name]  # another pipeline in this process has a module of that name
    module = importlib.import_module(name)
    pickle_by_value_from(directory)
    return module


def pickle_by_value(module: ModuleType) -> ModuleType:
    """Mark a module so that Spark sends its definitions with the tasks instead of its name."""
    from pyspark import cloudpickle

    cloudpickle.register_pickle_by_value(module)  # type: ignore[no-untyped-call]  # pyspark ships it without types
    return module


def pickle_by_value_from(directory: Path) -> None:
    """Mark all modules that were imported from this directory, including those that a step imports."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if file and Path(file).parent == directory and module.__name__ in sys.modules and module.__name__ != "__main__":
            pickle_by_value(module)


def _from_python(file: Path, overrides: Mapping[str, object]) -> Pipeline:
    shown, file = file, file.absolute()
    if str(file.parent) not in sys.path:
        sys.path.insert(0, str(file.parent))
    try:
        module = module_at(file, f"pipeline_{re.sub(r'[^A-Za-z0-9_]', '_', file.stem)}")
    except Exception as failure:  # user code may raise any exception; report it with its line
        raise ConfigError(f"{shown}{_line_in(failure, file)}: {reason_of(failure)}") from None
    pipeline = getattr(module, "pipeline", None)
    if not isinstance(pipeline, Pipeline):
        raise ConfigError(f"{shown}: no pipeline found: expected pipeline = Pipeline(...)")
    try:
        pickle_by_value_from(file.parent)
        pipeline.at(file.parent, **overrides)
        pipeline.check()
    except InvalidKey as failure:
        raise ConfigError(f"{shown}: {failure}") from None
    return pipeline


def reason_of(failure: BaseException) -> str:
    """Return an exception of user code in one line."""
    if isinstance(failure, (InvalidKey, HeadraceError, ImportError)):
        return str(failure)
    if isinstance(failure, SyntaxError):
        return failure.msg
    if "SESSION_OR_CONTEXT_NOT_EXISTS" in str(failure):
        return "this needs a Spark session, which does not exist while the file is loaded: move it into the function of a step"
    return f"{type(failure).__name__}: {failure}"


def _line_in(failure: BaseException, file: Path) -> str:
    """Return the line of the last traceback frame in the file."""
    if isinstance(failure, SyntaxError) and failure.filename == str(file):
        return f":{failure.lineno}"
    trace, line = failure.__traceback__, ""
    while trace is not None:
        if trace.tb_frame.f_code.co_filename == str(file):
            line = f":{trace.tb_lineno}"
        trace = trace.tb_next
    return line


def _read(file: Path) -> str:
    try:
        content = file.read_bytes()
    except OSError as failure:
        raise ConfigError(f"{file}: {failure.strerror or failure}") from None
    if len(content) > _FILE_BYTES_MAX:
        raise ConfigError(f"{file}: larger than {_FILE_BYTES_MAX} bytes")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{file}: not UTF-8 (byte {failure.start})") from None


def _table(document: Mapping[str, Any], section: str) -> dict[str, Any]:
    found = document.get(section, {})
    if not isinstance(found, Mapping):
        raise InvalidKey(section, f"expected a section [{section}]")
    return dict(found)
