"""Start of Spark's Java processes in half the CPU time.

Two files are kept in the virtual environment, made once by the first process that needs them:

- A SPARK_HOME whose Python is the installed package instead of a zip. Each of the four to seven Python processes of a session imports
  pyspark; from the zip, which holds no compiled code, that takes a second of CPU each.
- An archive of the loaded classes (class data sharing). Java takes nine seconds of CPU to load and verify Spark's classes, and half of that
  from the archive. Java ignores an archive that does not fit.
"""

from __future__ import annotations

import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import pyspark

KEPT: Final = Path(sys.prefix)
SMALL: Final = "-XX:TieredStopAtLevel=1 -XX:+UseSerialGC"
"""Options of Java for frequent starts and little computation."""
ARCHIVE_SECONDS_MAX: Final = 300

USE_SPARK = """
import sys
from headrace.spark import session
settings = {"spark.driver.memory": "768m", "spark.driver.host": "127.0.0.1", "spark.ui.enabled": False}
spark = session("classes", "local[1]", **settings, **{"spark.driver.extraJavaOptions": sys.argv[1]})
rows = spark.range(100).selectExpr("id % 3 as x", "to_json(struct(id)) as y").groupBy("x").count()
rows.join(spark.createDataFrame([(1, "a")], "x long, z string"), "x").collect()
stream = spark.readStream.format("rate-micro-batch").option("rowsPerBatch", 10).load()
query = stream.writeStream.format("noop").trigger(availableNow=True).option("checkpointLocation", sys.argv[2]).start()
query.processAllAvailable()
query.stop()
spark.stop()
"""


def spark_home() -> Path:
    """Return the SPARK_HOME of the virtual environment."""
    return _home("spark-home")


def bare_spark_home() -> Path:
    """Return a SPARK_HOME whose Python does not see the packages installed beside pyspark."""
    return _home("spark-bare", only=("pyspark", "py4j"))


def java_options(home: Path | None = None) -> str:
    """Return `SMALL` and the option that names the archive for `home`, by default `spark_home()`."""
    return f"{SMALL} -XX:SharedArchiveFile={_class_archive(home or spark_home())} -Xlog:disable"


def _home(name: str, *, only: tuple[str, ...] = ()) -> Path:
    home = KEPT / f"{name}-{pyspark.__version__}"
    with _alone(home):
        if not home.exists():
            made = home.with_suffix(".new")
            shutil.rmtree(made, ignore_errors=True)
            package = Path(pyspark.__file__).parent
            (made / "python" / "lib").mkdir(parents=True)
            for part in ("bin", "jars", "sbin", "data"):
                (made / part).symlink_to(package / part)
            (made / "packages").mkdir()
            for each in only:
                (made / "packages" / each).symlink_to(package.parent / each)
            for archive in (package / "python" / "lib").glob("*.zip"):
                (made / "python" / "lib" / archive.name).symlink_to("../../packages" if only else package.parent, target_is_directory=True)
            made.rename(home)
    return home


def _class_archive(home: Path) -> Path:
    java = Path(shutil.which("java", path=os.environ.get("JAVA_HOME", "") + "/bin") or shutil.which("java") or "java").resolve()
    key = hashlib.sha256(f"{home} {java} {java.stat().st_mtime}".encode()).hexdigest()[:12]
    archive = KEPT / f"spark-classes-{key}.jsa"
    with _alone(archive):
        if not archive.exists():
            made, checkpoint = archive.with_suffix(".new"), archive.with_suffix(".checkpoint")
            made.unlink(missing_ok=True)
            subprocess.run(
                [sys.executable, "-c", USE_SPARK, f"{SMALL} -XX:ArchiveClassesAtExit={made} -Xlog:disable", str(checkpoint)],
                env={**os.environ, "SPARK_HOME": str(home), "SPARK_LOCAL_IP": "127.0.0.1"},
                timeout=ARCHIVE_SECONDS_MAX, check=True, capture_output=True,
            )  # fmt: skip
            shutil.rmtree(checkpoint, ignore_errors=True)
            made.rename(archive)
    return archive


@contextmanager
def _alone(path: Path) -> Iterator[None]:
    with path.with_suffix(".lock").open("a") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
