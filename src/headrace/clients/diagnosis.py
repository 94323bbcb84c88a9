"""Find out why a server accepts connections and does not answer: the port may belong to something else.

One extra connection each, only after a failed first connection: does the server greet or answer as HTTP, does it speak TLS?
"""

from __future__ import annotations

import asyncio
import ssl
from typing import Final

PROBE_SECONDS: Final = 1.0
_GREETING_SECONDS: Final = 0.2
_HTTP_REQUEST: Final = b"GET / HTTP/1.0\r\n\r\n"


async def other_service(host: str, port: int, *, is_tls: bool) -> str:
    """Return what the port serves instead; empty if unknown. `is_tls`: the failed connection used TLS."""
    try:
        async with asyncio.timeout(PROBE_SECONDS):
            found = await _plain(host, port)
            if found or is_tls:
                return found
            return "the port requires TLS: add +tls to the scheme of the URL" if await _has_tls(host, port) else ""
    except (OSError, TimeoutError):
        return ""


async def _plain(host: str, port: int) -> str:
    reader, writer = await asyncio.open_connection(host, port)
    try:
        try:
            async with asyncio.timeout(_GREETING_SECONDS):
                first = await reader.read(64)
        except TimeoutError:
            writer.write(_HTTP_REQUEST)
            first = await reader.read(64)
    except OSError:
        return ""
    finally:
        writer.transport.abort()
    # A server of HTTP/2 begins with a SETTINGS frame (type 4) on stream 0.
    if len(first) >= 9 and first[3] == 4 and first[5:9] == bytes(4):
        return "the port serves HTTP/2 (gRPC): is it the Flight endpoint?"
    return "the port serves HTTP: is it a web server?" if first.startswith(b"HTTP/") else ""


async def _has_tls(host: str, port: int) -> bool:
    """Return whether the server answers a TLS handshake. Its certificate does not matter: nothing is sent."""
    context = ssl.create_default_context()
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    try:
        _, writer = await asyncio.open_connection(host, port, ssl=context)
    except ssl.SSLError as failure:
        # A certificate is asked for. A plain listener of Headrace answers TLS with the alert "handshake failure".
        return "ALERT" in (failure.reason or "") and "HANDSHAKE_FAILURE" not in failure.reason
    except OSError:
        return False
    writer.transport.abort()
    return True
