"""The console with a certificate of its own."""

from __future__ import annotations

import http.client
import json
import signal
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import trustme

from tests.console.harness import WAIT_SECONDS, BrokerThread


@pytest.fixture
def trust(tmp_path: Path) -> ssl.SSLContext:
    """Write the certificate of 127.0.0.1, and return what a browser trusts."""
    ca = trustme.CA()
    cert = ca.issue_cert("127.0.0.1")
    cert.cert_chain_pems[0].write_to_path(str(tmp_path / "console.pem"))
    (tmp_path / "console.key").touch(0o600)
    (tmp_path / "console.key").write_bytes(cert.private_key_pem.bytes())
    context = ssl.create_default_context()
    ca.configure_trust(context)
    return context


@pytest.fixture
def url(tmp_path: Path, trust: ssl.SSLContext, broker: BrokerThread) -> Iterator[str]:
    ready = tmp_path / "ready.json"
    files = ["--https-certificate", str(tmp_path / "console.pem"), "--https-key", str(tmp_path / "console.key")]
    # Beyond loopback: with a certificate it may listen there.
    arguments = ["--listen", "0.0.0.0:0", "--server", str(broker.address), "--ready-file", str(ready), *files]
    process = subprocess.Popen([sys.executable, "-m", "headrace", "console", *arguments], stdout=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + 2 * WAIT_SECONDS
        while not ready.exists():
            assert process.poll() is None and time.monotonic() < deadline, "the console did not start"
            time.sleep(0.05)
        yield json.loads(ready.read_text())["url"]
        process.send_signal(signal.SIGTERM)
        process.wait(WAIT_SECONDS)
    finally:
        process.kill()
        process.wait()


def test_beyond_loopback_the_console_serves_https_with_secure_cookies_and_no_http(url: str, trust: ssl.SSLContext) -> None:
    address = urlsplit(url)
    assert address.scheme == "https" and address.hostname == "0.0.0.0" and address.port
    secure = http.client.HTTPSConnection("127.0.0.1", address.port, timeout=WAIT_SECONDS, context=trust)
    secure.request("GET", "/", headers={"Sec-Fetch-Site": "none", "Host": f"0.0.0.0:{address.port}"})
    reply = secure.getresponse()
    reply.read()
    (cookie,) = reply.headers.get_all("set-cookie") or []
    assert {"secure", "httponly", "samesite=strict"} <= {part.strip().lower() for part in cookie.split(";")}
    assert reply.headers["strict-transport-security"]
    secure.close()
    plain = http.client.HTTPConnection("127.0.0.1", address.port, timeout=WAIT_SECONDS)
    with pytest.raises((http.client.HTTPException, OSError)):
        plain.request("GET", "/")
        plain.getresponse()
    plain.close()
