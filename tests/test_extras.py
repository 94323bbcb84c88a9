"""Optional libraries: the table matches pyproject.toml, and a missing library gives one clear error."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from headrace.errors import ConfigError
from headrace.extras import LIBRARIES, MissingExtra, needs

ROOT = Path(__file__).parent.parent
DISTRIBUTIONS = {
    "hdrh": "hdrhistogram",
    "nats": "nats-py",
    "google.protobuf": "protobuf",
    "jsonschema_rs": "jsonschema-rs",
    "py4j": "pyspark",
    "OpenSSL": "pyopenssl",
    "multipart": "python-multipart",
    "opentelemetry": "opentelemetry-sdk",
    "prometheus_client": "prometheus-client",
}
"""Libraries whose import name is not the name to install."""


def test_the_extra_of_each_library_is_the_one_of_the_package() -> None:
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    for name, library in LIBRARIES.items():
        listed = {re.split(r"[><=;\s\[]", requirement)[0] for requirement in extras[library.extra]}
        assert DISTRIBUTIONS.get(name, name) in listed, f"{name} is not in the extra {library.extra}"


def test_every_library_that_the_source_imports_is_one_of_the_core_or_in_the_table() -> None:
    core = {"argon2", "backports", "click", "compression", "cryptography", "google_crc32c", "msgspec", "re2", "rich", "uvloop"}
    only_types = {"mypy_extensions", "_typeshed"}  # imported where types are checked or modules compiled, never at run time
    known = core | only_types | sys.stdlib_module_names | {name.partition(".")[0] for name in LIBRARIES} | {"headrace"}
    for path in (ROOT / "src").glob("**/*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            assert {name.partition(".")[0] for name in names} <= known, f"{path.relative_to(ROOT)} imports {names}"


def test_an_absent_library_is_named_with_the_command_that_installs_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyspark", None)
    with pytest.raises(ImportError) as caught, needs("this", "pyspark"):
        raise AssertionError("the block must not begin")
    assert str(caught.value) == "this needs Spark: pip install 'headrace[spark]'"
    assert isinstance(caught.value, ConfigError)
    assert caught.value.name == "pyspark"


def test_all_missing_extras_are_named_at_once_and_none_that_another_installs(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("pyarrow", "pyspark", "deltalake", "aioquic"):
        monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(MissingExtra) as caught, needs("this", "aioquic", "pyarrow", "pyspark", "deltalake"):
        pass
    assert str(caught.value) == "this needs Spark, Delta Lake and aioquic: pip install 'headrace[quic,spark,tables]'"


@pytest.mark.parametrize("module", ["pyspark.sql.functions", "google.protobuf.message", "hdrh"])
def test_an_import_that_fails_inside_the_block_is_explained(module: str) -> None:
    with pytest.raises(MissingExtra, match=r"^this needs \w+: pip install 'headrace\[\w+\]'$"), needs("this"):
        raise ModuleNotFoundError(f"No module named {module!r}", name=module)


@pytest.mark.parametrize("module", ["headrace.nothing", "google.cloud", "users_own", None])
def test_an_import_that_no_extra_would_mend_stays_as_it_is(module: str | None) -> None:
    failure = ModuleNotFoundError("gone", name=module)
    with pytest.raises(ModuleNotFoundError) as caught, needs("this"):
        raise failure
    assert caught.value is failure


def test_the_innermost_need_is_the_one_that_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra, match=r"^inner needs Arrow"), needs("outer"), needs("inner", "pyarrow"):
        pass


def test_a_function_can_be_decorated_and_is_checked_at_each_call(monkeypatch: pytest.MonkeyPatch) -> None:
    @needs("this", "pyarrow")
    def called() -> int:
        return 7

    assert called() == called() == 7
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(MissingExtra):
        called()


@pytest.mark.parametrize(
    "library, statement, text",
    [
        ("pyarrow", "import headrace.arrow", "headrace.arrow needs Arrow: pip install 'headrace[flight]'"),
        ("numpy", "import headrace.arrow", "headrace.arrow needs NumPy: pip install 'headrace[flight]'"),
        (
            "pyspark",
            "import headrace.spark; headrace.spark.session()",
            "headrace.spark.session() needs Spark: pip install 'headrace[spark]'",
        ),
        ("pyspark", "from headrace.spark import HeadraceSource", "headrace.spark needs Spark: pip install 'headrace[spark]'"),
        ("pyspark", "import headrace.spark; headrace.spark.register(None)", "headrace.spark needs Spark: pip install 'headrace[spark]'"),
        ("pyspark", "import pyspark_headrace", "headrace.spark needs Spark: pip install 'headrace[spark]'"),
        (
            "pyarrow",
            "from headrace.spark.pipelines import reject",
            "headrace.spark.pipelines.reject needs Arrow: pip install 'headrace[flight]'",
        ),
        ("aioquic", "import headrace; headrace.connect('fujin://127.0.0.1')", "fujin:// needs aioquic: pip install 'headrace[quic]'"),
        ("aioquic", "import headrace; headrace.sync.connect('fujin://127.0.0.1')", "fujin:// needs aioquic: pip install 'headrace[quic]'"),
    ],
)
def test_a_module_without_its_library_raises_one_clear_import_error(library: str, statement: str, text: str) -> None:
    code = f"import sys\nsys.modules[{library!r}] = None\ntry:\n    {statement}\nexcept ImportError as missing:\n    print(missing)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.stdout, done.stderr) == (f"{text}\n", "")


@pytest.mark.parametrize("kind, library, title", [("delta", "deltalake", "Delta Lake"), ("iceberg", "pyiceberg", "Iceberg")])
def test_a_sink_without_the_library_of_its_table_names_the_extra(
    kind: str, library: str, title: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    from headrace.spark.pipelines.model import Sink
    from headrace.spark.pipelines.tables.writing import open_table

    module = f"headrace.spark.pipelines.tables.{kind}"
    for name in [name for name in sys.modules if name == module or name.startswith(f"{library}.")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(MissingExtra) as caught:
        open_table(Sink(name="archive", source="orders", kind=kind), "/nowhere")
    assert str(caught.value) == f"sinks.archive: kind = {kind!r} needs {title}: pip install 'headrace[tables]'"


def test_the_core_is_imported_without_any_extra() -> None:
    modules = "headrace, headrace.sync, headrace.spark, headrace.spark.pipelines, headrace.clients.connect, headrace.server.wiring"
    code = f"import sys\nfor name in {list(LIBRARIES)!r}: sys.modules[name] = None\nimport headrace\nheadrace.sync, headrace.connect\n"
    code += "\n".join(f"import {name}" for name in modules.split(", ") if name != "headrace.sync")
    subprocess.run([sys.executable, "-c", code], timeout=120, check=True)
