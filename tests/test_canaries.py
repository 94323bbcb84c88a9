"""The secret scanner of the suite detects every kind of leak, and no secret leaks where all of them are in use."""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests import canaries
from tests.canaries import ENCRYPTION_KEY, secret
from tests.server.process import BrokerProcess

ROOT = Path(__file__).parents[1]
LEAKS = {
    "printed": "print(SECRET)",
    "logged": "logging.getLogger('headrace.x').warning('welcome', extra={'reason': SECRET})",
    "in an error": "raised(SECRET)",
    "in an error, as bytes": "raised(ENCRYPTION_KEY)",
    "on a command line": "subprocess.run(['true', SECRET])",
    "on the stdout of a process": "subprocess.run([sys.executable, '-c', 'print(input())'], input=SECRET.encode(), capture_output=True)",
    "on the stderr of a process": "subprocess.run(['sh', '-c', 'cat >&2'], input=SECRET.encode(), capture_output=True)",
    "in the file of a process": "subprocess.run(['cat'], input=SECRET.encode(), stdout=(tmp_path / 'log').open('wb'))",
    "in the pipe of a process on a loop": "asyncio.run(child(SECRET))",
    "in a ready file": "canaries.look(SECRET, 'ready file')",
}
PRELUDE = """
import asyncio, logging, subprocess, sys
from headrace.errors import ConfigError
from tests import canaries
from tests.canaries import ENCRYPTION_KEY, secret

SECRET = secret("planted")

def raised(what):
    try:
        raise ConfigError(f"{what!r} is wrong")
    except ConfigError:
        pass

async def child(text):
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec("cat", stdin=pipe, stdout=pipe)
    process.stdin.write(text.encode())
    process.stdin.close()
    await process.stdout.read()
    await process.wait()

def test_nothing():
    print("nothing", secret)
"""


def test_every_kind_of_leak_fails_the_test_it_happens_in(tmp_path: Path) -> None:
    tests = [f"def test_{index}(tmp_path):\n    {leak}\n" for index, leak in enumerate(LEAKS.values())]
    (tmp_path / "test_leaks.py").write_text(PRELUDE + "\n" + "\n".join(tests))
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    command = [sys.executable, "-m", "pytest", "-p", "tests.canaries", "-p", "no:cacheprovider", "-q", "-rf", str(tmp_path)]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    # Not through the scanner of this process: the output contains what it searches for.
    with (tmp_path / "report").open("wb") as report:
        code = os.spawnve(os.P_WAIT, "/bin/sh", ["sh", "-c", f"exec {' '.join(command)} >{report.name} 2>&1"], environment)
    output = (tmp_path / "report").read_text()
    assert code == 1, output
    failed = [line for line in output.splitlines() if line.startswith("FAILED")]
    assert len(failed) == len(LEAKS), output
    assert output.count("\na secret shows in ") == len(LEAKS), output
    assert "test_nothing" not in "".join(failed)


@pytest.mark.parametrize("before", [b"", b"x", b"xy", b"xyz"])
@pytest.mark.parametrize("held", [secret("any").encode(), ENCRYPTION_KEY])
def test_a_secret_is_known_again_in_other_clothes(held: bytes, before: bytes) -> None:
    text = before + held + b"!"
    for shown in (text, text.hex().encode(), text.hex().upper().encode(), base64.b64encode(text), base64.urlsafe_b64encode(text)):
        if shown == text.hex().upper().encode() and held is not ENCRYPTION_KEY:
            continue
        assert canaries.shows(b"some words " + shown + b" and more")
    assert canaries.shows(f"{held!r}")
    assert not canaries.shows(f"{before!r} and other words")


def test_a_broker_with_every_secret_there_is_shows_none(tmp_path: Path) -> None:
    """Return its replies and its debug log; the scanner covers the rest."""
    files = {name: tmp_path / name for name in ("admin", "api-key")}
    contents = (secret("admin-password"), secret("api-key"))
    for file, content in zip(files.values(), contents, strict=True):
        file.touch(0o600)
        file.write_text(content)
    settings: dict[str, Any] = {
        "HEADRACE__ACCESS__MODE": "enforced",
        "HEADRACE__ACCESS__ADMIN_PASSWORD_FILE": str(files["admin"]),
        "HEADRACE__STORAGE__KEY_ENV": "KEY",
        "KEY": ENCRYPTION_KEY.hex(),
        "HEADRACE__BLIPMQ__KEYS": f"ann=file:{files['api-key']},env:OTHER_KEY",
        "HEADRACE__LOGGING__LEVEL": "debug",
        "OTHER_KEY": secret("other-key"),
    }
    listen = ("--listen-quic", "127.0.0.1:0")
    with BrokerProcess(tmp_path, *listen, log=tmp_path / "log", **settings) as broker:
        for output in ("table", "toml", "json"):
            shown = command("config", "show", "-o", output, **settings)
            assert shown.returncode == 0, shown.stderr
            assert str(files["api-key"]) in "".join(shown.stdout.split()) or output == "table", "the name of the file is no secret"
        server = {"HEADRACE_SERVER": "{}:{}".format(*broker.addresses[0]), "HEADRACE_USER": "admin"}
        right, wrong = tmp_path / "right", tmp_path / "wrong"
        for file, text in ((right, secret("admin-password")), (wrong, secret("wrong-password"))):
            file.touch(0o600)
            file.write_text(text)
        assert command("user", "list", HEADRACE_PASSWORD_FILE=str(right), **server).returncode == 0
        assert command("user", "list", HEADRACE_PASSWORD_FILE=str(wrong), **server).returncode == 4
        for key, code in ((secret("api-key"), 4), (secret("other-key"), 4), (secret("wrong-key"), 4)):
            done = command("pub", "t", "x", "--protocol", "blipmq", "-q", "--api-key", "env:API_KEY", API_KEY=key, **server)
            assert done.returncode == code, done.stderr
        code, out, _ = broker.stop()
        assert code == 0
    assert "shown this once" not in out
    stored = b"".join(path.read_bytes() for path in broker.data.rglob("*") if path.is_file())
    assert not canaries.shows(stored)


def test_wrong_references_to_secrets_are_refused_without_them(tmp_path: Path) -> None:
    """A secret given in place of its location does not appear in the error."""
    named = (
        ("HEADRACE__BLIPMQ__KEYS", secret("itself")),
        *(("HEADRACE__STORAGE__KEY_ENV", key) for key in (secret("x"), ENCRYPTION_KEY.hex())),
    )
    for name, wrong in named:
        done = command("config", "show", **{name: wrong})
        assert done.returncode == 1
        assert name.removeprefix("HEADRACE__").lower().replace("__", ".") in done.stderr


def command(*words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    inherited = {name: value for name, value in os.environ.items() if not name.startswith("HEADRACE")}
    return subprocess.run(
        [sys.executable, "-m", "headrace", *words],
        capture_output=True,
        text=True,
        env={**inherited, **environment},
        timeout=300,
        check=False,
    )
