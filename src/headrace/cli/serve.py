"""`headrace serve`: run the broker."""

from __future__ import annotations

import math
import os
from pathlib import Path

import click


def to_seconds(context: click.Context, parameter: click.Parameter, text: str | None) -> float | None:
    """Parse a duration. A plain number means seconds, for scripts."""
    if text is None:
        return None
    try:
        seconds = float(text)
    except ValueError:
        from headrace.server.units import parse_duration

        try:
            seconds = parse_duration(text) / 1000
        except ValueError as failure:
            raise click.BadParameter(f"{text!r}: {failure}; expected seconds, or a duration such as 5m") from None
    if not 0 < seconds < math.inf:
        raise click.BadParameter(f"{text!r} is not a duration")
    return seconds


def _assignments(context: click.Context, parameter: click.Parameter, pairs: tuple[str, ...]) -> dict[str, str]:
    chosen: dict[str, str] = {}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise click.BadParameter(f"{pair!r} is not KEY=VALUE")
        chosen[key.strip()] = value.strip()
    return chosen


@click.command()
@click.option("--data", metavar="DIR", help="Data directory (storage.path); created if absent.")
@click.option("--engine", metavar="NAME", help="Where the log is (storage.engine): embedded or kafka (see kafka.bootstrap).")
@click.option(
    "--config",
    "file",
    metavar="FILE",
    type=click.Path(path_type=Path),
    envvar="HEADRACE_CONFIG",
    show_envvar=True,
    help="TOML configuration file.",
)
@click.option(
    "--listen",
    metavar="HOST:PORT[=PROTOCOL,…]",
    multiple=True,
    help="TCP listener (listen.tcp) for all protocols or those named; may be repeated. Port 0 picks a free port.",
)
@click.option(
    "--listen-quic",
    metavar="HOST:PORT",
    multiple=True,
    help="QUIC listener (listen.quic) for Fujin; may be repeated. Port 0 picks a free port.",
)
@click.option(
    "--listen-flight",
    metavar="HOST:PORT",
    multiple=True,
    help="Arrow Flight endpoint (listen.flight); may be repeated. Port 0 picks a free port.",
)
@click.option(
    "--listen-http",
    metavar="HOST:PORT",
    multiple=True,
    help="HTTP listener (listen.http) for metrics and health; may be repeated. Port 0 picks a free port.",
)
@click.option(
    "--blipmq-key",
    "blipmq_keys",
    metavar="KEY",
    multiple=True,
    help="API key for BlipMQ; may be repeated. Prefer file:PATH or env:NAME: other users of the machine can see a command line.",
)
@click.option(
    "--set", "chosen", metavar="KEY=VALUE", multiple=True, callback=_assignments, help="Set a configuration key; may be repeated."
)
@click.option(
    "--ready-file",
    metavar="PATH",
    type=click.Path(path_type=Path),
    help="Write pid and addresses to this file as JSON once every listener is open.",
)
@click.option("--duration", metavar="SECONDS", callback=to_seconds, help="Drain and exit with 0 after this time.")
@click.option("--insecure", is_flag=True, help="Allow addresses beyond loopback without TLS or without authentication.")
def serve(
    data: str | None,
    engine: str | None,
    file: Path | None,
    listen: tuple[str, ...],
    listen_quic: tuple[str, ...],
    listen_flight: tuple[str, ...],
    listen_http: tuple[str, ...],
    blipmq_keys: tuple[str, ...],
    chosen: dict[str, str],
    ready_file: Path | None,
    duration: float | None,
    insecure: bool,
) -> int:
    """Start the broker.

    It runs until SIGTERM or Ctrl-C, then drains: it finishes and acknowledges received requests. A second signal exits immediately.
    SIGHUP reloads the certificates.
    """
    from headrace.server.addresses import require_caution
    from headrace.server.config_sources import explain, resolve
    from headrace.server.serve import ServeOptions
    from headrace.server.serve import serve as run

    flags: dict[str, tuple[str, object]] = {explain(key).name: (f"--set {key}", value) for key, value in chosen.items()}
    if data is not None:
        flags["storage.path"] = ("--data", data)
    if engine is not None:
        flags["storage.engine"] = ("--engine", engine)
    if listen:
        flags["listen.tcp"] = ("--listen", list(listen))
    if listen_quic:
        flags["listen.quic"] = ("--listen-quic", list(listen_quic))
    if listen_flight:
        flags["listen.flight"] = ("--listen-flight", list(listen_flight))
    if listen_http:
        flags["listen.http"] = ("--listen-http", list(listen_http))
    config = resolve(file=file, environment=os.environ, flags=flags).config
    if not insecure:
        require_caution(config)
    return run(config, ServeOptions(ready_file, duration, blipmq_keys), os.environ)
