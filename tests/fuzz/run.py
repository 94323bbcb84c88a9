"""Fuzz every target with coverage feedback.

    python -m tests.fuzz.run [--seconds 600] [--only json-schema --only arrow] [--directory .fuzz]

The time is divided among all targets. Each runs in its own process, so that a crash is a finding and does not stop the others. The corpus
stays in the directory and is the start of the next run; an input that fails is kept in `findings/` and can be tried again with
`--input FILE --only TARGET`. Exits with 1 when there is a finding.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Final

TIMEOUT_SECONDS: Final = 20
"""One input may not take longer. Generous: instrumented code is several times slower, and the machine may be busy."""
RSS_MIB_MAX: Final = 2_048
INPUT_BYTES_MAX: Final = 16_384
_TARGETS: Final = "tests.fuzz.targets"
_INSTRUMENTED: Final = "headrace"


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--seconds", type=int, default=600, help="for all targets together, on all processors")
    parser.add_argument("--only", action="append", default=[], metavar="TARGET", help="may be repeated")
    parser.add_argument("--directory", type=Path, default=Path(".fuzz"))
    parser.add_argument("--input", type=Path, help="try one file on one target, without fuzzing")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.child:
        _fuzz(options.child, options.directory, options.seconds)
        return 0
    targets = importlib.import_module(_TARGETS).TARGETS
    names: list[str] = options.only or list(targets)
    if unknown := set(names) - set(targets):
        parser.error(f"unknown targets: {', '.join(sorted(unknown))}; expected some of {', '.join(targets)}")
    if options.input:
        for name in names:
            targets[name].run(options.input.read_bytes())
        return 0
    for name in names:
        _write_seeds(options.directory / name, targets[name].seeds())
    (options.directory / "findings").mkdir(exist_ok=True)
    workers = os.cpu_count() or 1
    seconds = max(1, options.seconds * workers // len(names))
    with ThreadPoolExecutor(workers) as pool:
        results = list(pool.map(lambda name: _run_child(name, options.directory, seconds), names))
    return 1 if any(results) else 0


def _write_seeds(directory: Path, seeds: list[bytes]) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    for seed in seeds:
        (directory / hashlib.sha1(seed, usedforsecurity=False).hexdigest()).write_bytes(seed)


def _run_child(name: str, directory: Path, seconds: int) -> int:
    """Return the exit code; print one line, and the output of a target that failed."""
    command = [sys.executable, "-m", "tests.fuzz.run", "--child", name, "--directory", str(directory), "--seconds", str(seconds)]
    log = directory / f"{name}.log"
    with log.open("wb") as output:
        code = subprocess.run(command, stdin=subprocess.DEVNULL, stdout=output, stderr=subprocess.STDOUT, check=False).returncode
    text = log.read_text(errors="replace")
    done = next((line for line in reversed(text.splitlines()) if "DONE" in line or "Done" in line), "")
    print(f"{'FOUND ' if code else 'clean '} {name}  {done}", flush=True)
    if code:
        print("\n".join(text.splitlines()[-40:]), flush=True)
    return code


def _fuzz(name: str, directory: Path, seconds: int) -> None:
    try:
        atheris: Any = importlib.import_module("atheris")  # only `make fuzz` installs it
    except ModuleNotFoundError:
        sys.exit("fuzzing needs atheris: pip install 'atheris>=3,<4'")
    with atheris.instrument_imports(include=[_INSTRUMENTED]):
        target = importlib.import_module(_TARGETS).TARGETS[name]
    flags = [
        f"-max_total_time={seconds}",
        f"-timeout={TIMEOUT_SECONDS}",
        f"-rss_limit_mb={RSS_MIB_MAX}",
        f"-max_len={INPUT_BYTES_MAX}",
        f"-artifact_prefix={directory / 'findings' / name}-",
    ]
    atheris.Setup([sys.argv[0], *flags, str(directory / name)], target.run)
    atheris.Fuzz()


if __name__ == "__main__":
    sys.exit(main())
