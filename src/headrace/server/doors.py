"""Which protocols are served, and with which settings: the only place that names them all."""

from __future__ import annotations

from headrace.broker.access import Principal
from headrace.broker.broker import Broker
from headrace.net.door import Door
from headrace.server.config import Config
from headrace.sessions.contract import Link, Session
from headrace.sessions.figg import FiggSession, FiggSettings
from headrace.wire import figg


def tcp_doors(broker: Broker, config: Config) -> list[Door]:
    """All doors of a TCP address, the surest sniffer first."""
    return [_figg(broker, config)]


def _figg(broker: Broker, config: Config) -> Door:
    settings = FiggSettings(
        ack_each=config.figg.ack_each,
        strict_version=config.figg.strict_version,
        frame_bytes_max=config.limits.frame,
        in_flight_bytes_max=config.limits.in_flight,
        idle_seconds=config.limits.idle_timeout / 1000,
    )

    def open_session(link: Link) -> Session:
        # Figg has no login: whoever comes through this door is nobody in particular.
        return FiggSession(broker, link, Principal("anonymous", "figg"), settings)

    return Door("figg", figg.sniff, open_session)
