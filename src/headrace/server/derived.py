"""Settings of the layers, derived from the configuration."""

from __future__ import annotations

from headrace.broker.settings import BrokerSettings
from headrace.broker.writers.memory import unspilled_bytes
from headrace.engine.contract import TopicConfig
from headrace.limits import OUTPUT_HIGH_WATER_BYTES, OUTPUT_LOW_WATER_BYTES, PUBLICATION_BYTES_MAX, TRANSACTION_BYTES_MAX
from headrace.net.listener import NetLimits
from headrace.server.config import Config
from headrace.server.settings import AccessMode


def broker_settings(config: Config) -> BrokerSettings:
    """Return the broker settings of the configuration."""
    return BrokerSettings(
        auto_create=config.topics.auto_create,
        auto_create_partitions=config.topics.partitions,
        topic_defaults=TopicConfig(
            ack=config.storage.ack,
            retention_ms=config.topics.retention,
            retention_bytes=config.topics.retention_size,
            segment_bytes=config.storage.segment_size,
            compress=config.storage.compress,
        ),
        stages_memory_bytes=config.limits.staged_memory,
        publication_bytes=min(max(TRANSACTION_BYTES_MAX, unspilled_bytes(config.limits.staged_memory)), PUBLICATION_BYTES_MAX),
    )


def net_limits(config: Config) -> NetLimits:
    """Return the connection limits of the configuration."""
    is_enforced = config.access.mode is AccessMode.ENFORCED
    high_water_bytes = min(OUTPUT_HIGH_WATER_BYTES, config.limits.output_buffer)
    return NetLimits(
        connections_max=config.limits.connections,
        connections_per_ip_max=config.limits.connections_per_ip,
        connections_per_user_max=config.limits.connections_per_user,
        connections_reserved=config.limits.connections_reserved if is_enforced else 0,
        login_seconds=config.limits.login_timeout / 1000 if is_enforced else 0.0,
        handshake_seconds=config.limits.handshake_timeout / 1000,
        output_high_water_bytes=high_water_bytes,
        output_low_water_bytes=min(OUTPUT_LOW_WATER_BYTES, high_water_bytes),
        output_bytes_max=config.limits.output_buffer,
        output_total_bytes_max=config.limits.output_total,
        frame_check_seconds=config.limits.frame_timeout / 1000,
        unfinished_bytes_max=config.limits.unfinished_frames,
    )


def flight_connections(config: Config) -> int:
    """Return the connection limit of the Flight endpoint; 0 without one."""
    return config.limits.flight_connections if config.listen.flight else 0
