"""Latency of BlipMQ QoS 1 for a client that leaves Nagle's algorithm on: `python -m benchmarks.nagle [MESSAGES]`.

Each message is published, confirmed by a PING, polled and acknowledged, with one write per frame. BlipMQ answers neither PUBLISH nor ACK,
so the client's kernel holds the next small write until the broker's kernel has acknowledged the one before. A delayed acknowledgement
takes 40 ms.
"""

from __future__ import annotations

import socket
import sys
import time
from statistics import median

from headrace.bench.children import broker, workspace
from headrace.bench.protocols.blipmq import BlipMqLoad
from headrace.bench.protocols.contract import receive_exactly
from headrace.wire.blipmq import encoder
from headrace.wire.blipmq.frames import HEAD, HEAD_BYTES, LENGTH

_TIMEOUT_SECONDS = 60


def _frame(sock: socket.socket) -> int:
    """Receive one frame and return its correlation id."""
    length, _, cid = HEAD.unpack(receive_exactly(sock, HEAD_BYTES))
    receive_exactly(sock, length + LENGTH.size - HEAD_BYTES)
    return int(cid)


def measure(messages: int) -> list[float]:
    """Return the milliseconds of each message."""
    load, taken = BlipMqLoad(), []
    with workspace(None) as directory, broker(directory) as served:
        with socket.create_connection(served.address, _TIMEOUT_SECONDS) as sock:
            load.handshake(sock, served.key)
            subscription = load.subscribe(sock, "nagle")
            for number in range(messages):
                began = time.perf_counter()
                sock.sendall(encoder.publishes(1, "nagle", [number], [b"x" * 100]))
                sock.sendall(encoder.ping(number))
                _frame(sock)
                sock.sendall(encoder.polls(subscription, [number]))
                sock.sendall(encoder.ack(_frame(sock), subscription))
                taken.append((time.perf_counter() - began) * 1e3)
    return taken


def main() -> None:
    taken = sorted(measure(int(sys.argv[1]) if len(sys.argv) > 1 else 200))
    print(f"{len(taken)} messages: p50 {median(taken):.2f} ms, p99 {taken[len(taken) * 99 // 100]:.2f} ms")


if __name__ == "__main__":
    main()
