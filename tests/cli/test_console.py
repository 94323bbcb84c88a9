"""`headrace console`: options, and the process from its start to its end."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from tests.cli.shell import headrace


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["--listen", "0.0.0.0:0"], "can be reached from the network, and nothing is encrypted"),
        (["--listen", "nonsense"], "is not HOST:PORT"),
        (["--root-path", "console"], "is not a path such as /console"),
        (["--https-key", "key.pem"], "give --https-certificate and --https-key together"),
        (["--server", "figg://127.0.0.1"], "contradicts the protocol"),
    ],
)
def test_a_wrong_option_is_one_line(arguments: list[str], error: str) -> None:
    done = headrace("console", *arguments)
    assert done.code != 0 and error in done.err and done.err.count("\n") == 1


def test_the_console_starts_without_a_broker_says_so_and_ends_cleanly(tmp_path: Path) -> None:
    ready = tmp_path / "ready.json"
    arguments = ["--listen", "127.0.0.1:0", "--server", "127.0.0.1:1", "--ready-file", str(ready)]
    process = subprocess.Popen([sys.executable, "-m", "headrace", "console", *arguments], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        deadline = time.monotonic() + 300
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, "the console did not start"
            time.sleep(0.05)
        url = json.loads(ready.read_text())["url"]
        with pytest.raises(urllib.error.HTTPError) as caught:
            _get(url, deadline)
        assert caught.value.code == 503 and b"cannot connect to 127.0.0.1:1" in caught.value.read()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=300)
        assert process.returncode in (0, -signal.SIGTERM) and url in out.decode() and err == b""
    finally:
        process.kill()
        process.communicate()


def _get(url: str, deadline: float) -> None:
    while True:
        try:
            urllib.request.urlopen(url, timeout=300).close()
            return
        except ConnectionError:
            assert time.monotonic() < deadline
