"""Contents of the HTTP listener, assembled from the parts of a server. Imported only when configured: its library is an extra."""

from __future__ import annotations

import asyncio
import shutil
from collections import Counter
from collections.abc import Awaitable, Callable

from headrace.broker.broker import Broker
from headrace.engine.contract import Engine, HealthState
from headrace.net.counters import NetCounters
from headrace.server.config import Config
from headrace.server.http import LoopCalls, Pages
from headrace.server.loop_lag import LoopLag
from headrace.server.metrics import Sources, registry
from headrace.spark.pipelines.executions import executions


def operator_pages(
    config: Config,
    broker: Broker,
    engine: Engine,
    net: NetCounters,
    loop_lag: LoopLag,
    *,
    connections_max: int,
    flight_calls: Callable[[], tuple[int, int, Counter[str]]],
    overview: Callable[[], Awaitable[object]],
    is_draining: Callable[[], bool],
) -> Pages:
    """Return the pages. Called on the event loop."""
    calls = LoopCalls(asyncio.get_running_loop())

    def disk() -> tuple[int, int]:
        usage = shutil.disk_usage(config.storage.path)
        return usage.free, usage.total

    async def unready() -> list[str]:
        health = broker.health
        reasons = ["the broker is draining"] if is_draining() else []
        if health.state is HealthState.FAILED or any(problem.step == "disk space" for problem in health.problems):
            reasons += [str(problem) for problem in health.problems]
        return reasons

    sources = Sources(
        read=lambda: calls.wait(lambda: broker.measure(config.metrics.series)),
        meters=broker.meters,
        engine=engine,
        net=net,
        connections_max=connections_max,
        loop_lag=loop_lag,
        disk=disk,
        headroom_bytes=config.storage.headroom,
        flight_calls=flight_calls,
        pipelines=executions,
        kafka_names=config.metrics.kafka_names,
    )
    return Pages(calls, registry(sources), unready, overview)
