"""`headrace demo`: run the demo."""

from __future__ import annotations

from pathlib import Path

import click

from headrace.cli.serve import to_seconds
from headrace.extras import needs


@click.command()
@click.argument("pipeline", type=click.Path(exists=True, dir_okay=False, path_type=Path))
@click.option("--data", metavar="DIR", type=click.Path(path_type=Path), default=Path("data"), show_default=True, help="Data directory.")
@click.option(
    "--duration", metavar="SECONDS", callback=to_seconds, help="Send orders for this time, verify, and exit. Default: until Ctrl-C."
)
@click.option("--rate", metavar="N", type=click.FloatRange(1, 100_000), default=500.0, show_default=True, help="Orders per second.")
@click.option("--listen", metavar="HOST:PORT", multiple=True, help="As `headrace serve --listen`; the first must serve every protocol.")
@click.option("--listen-quic", metavar="HOST:PORT", default="127.0.0.1:4848", show_default=True, help="As `headrace serve --listen-quic`.")
@click.option(
    "--listen-flight", metavar="HOST:PORT", default="127.0.0.1:8815", show_default=True, help="As `headrace serve --listen-flight`."
)
@click.option("--listen-console", metavar="HOST:PORT", default="127.0.0.1:9645", show_default=True, help="As `headrace console --listen`.")
@click.option(
    "--engine",
    type=click.Choice(["embedded", "kafka"]),
    default="embedded",
    show_default=True,
    help="Where the log is. kafka: on a Kafka node that is downloaded once, started for the demo, and deleted at the end.",
)
@needs("headrace demo", "pyspark", "pyarrow", "pandas", "deltalake", "aioquic", "starlette", "uvicorn", "jinja2")
def demo(
    pipeline: Path,
    data: Path,
    duration: float | None,
    rate: float,
    listen: tuple[str, ...],
    listen_quic: str,
    listen_flight: str,
    listen_console: str,
    engine: str,
) -> int:
    """Run broker, pipeline and sample traffic together.

    Starts a broker with all protocols, the web console and a pipeline on Spark, and publishes orders through every protocol, some of
    them malformed. PIPELINE is the file of the pipeline that counts them: examples/orders/pipeline.toml. At the end, the demo compares
    the published orders with the totals of the pipeline. Exits with 0 if they match, 1 otherwise.
    """
    from rich.console import Console

    from headrace.demo.demo import DemoOptions, run_demo

    options = DemoOptions(pipeline, data, duration, rate, listen, listen_quic, listen_flight, listen_console, is_on_kafka=engine == "kafka")
    return 0 if run_demo(options, Console()) else 1
