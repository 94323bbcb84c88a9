"""Discovery of the format, and the cost of its import."""

from __future__ import annotations

import pickle
import pkgutil
import subprocess
import sys

import headrace.spark
import pyspark_headrace
from headrace.spark.source import HeadraceSource


def test_spark_discovers_the_format() -> None:
    """Discover the source like Spark: by module prefix and class name."""
    assert "pyspark_headrace" in [module.name for module in pkgutil.iter_modules()]
    assert pyspark_headrace.DefaultSource is headrace.spark.DefaultSource is HeadraceSource
    assert HeadraceSource.name() == "headrace"


def test_a_source_is_its_options() -> None:
    source = pickle.loads(pickle.dumps(HeadraceSource({"subscribe": "t"})))
    assert isinstance(source, HeadraceSource) and source.options == {"subscribe": "t"}


def test_pyspark_is_imported_only_when_it_is_needed() -> None:
    code = (
        "import sys, headrace.spark, headrace.spark.options, headrace.spark.session\n"
        "print([name for name in ('pyspark', 'pyarrow', 'numpy') if name in sys.modules])"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_what_the_package_does_not_have_is_an_attribute_error() -> None:
    assert not hasattr(headrace.spark, "DefaultSink")
