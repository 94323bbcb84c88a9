"""Command line: one group that imports each command when it is called.

`headrace --help` must be fast, so this module imports only click, and the table below repeats the one-line help of each command (a test
compares them). Data goes to stdout, messages to stderr.

An error is one line, `headrace: …`, preceded by its traceback with HEADRACE_TRACEBACK=1. `EXIT_CODES` lists the exit codes.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, NamedTuple, NoReturn

import click
from click.shell_completion import CompletionItem

from headrace import __version__
from headrace.errors import HeadraceError
from headrace.extras import MissingExtra, explained, needs

FAILED, WRONG_USAGE, NOT_FOUND, NOT_ALLOWED, UNAVAILABLE, TOO_SLOW, CONFLICT, REFUSED, INTERRUPTED = 1, 2, 3, 4, 5, 6, 7, 8, 130
EXIT_CODES: Final[Mapping[int, str]] = {
    0: "success",
    FAILED: "failure; a check found something that needs action",
    WRONG_USAGE: "wrong usage, or an extra is not installed",
    NOT_FOUND: "topic, group, schema, message or other entry not found",
    NOT_ALLOWED: "not allowed, or the login failed",
    UNAVAILABLE: "the broker is unreachable or unavailable, or its disk is full",
    TOO_SLOW: "timeout",
    CONFLICT: "conflict with existing state, or a record that its schema rejects",
    REFUSED: "the broker closed one connection after the other: not logged in, an unknown topic, or another protocol on the port",
    INTERRUPTED: "interrupted by Ctrl-C",
}
_KINDS: Final[Mapping[str, int]] = {
    "unknown_topic": NOT_FOUND,
    "unknown_partition": NOT_FOUND,
    "unknown_group": NOT_FOUND,
    "unknown_message": NOT_FOUND,
    "offset_out_of_range": NOT_FOUND,
    "no_such_entry": NOT_FOUND,
    "unknown_schema": NOT_FOUND,
    "unknown_stage": NOT_FOUND,
    "not_authorized": NOT_ALLOWED,
    "login_failed": NOT_ALLOWED,
    "unavailable": UNAVAILABLE,
    "not_coordinator": UNAVAILABLE,
    "disk_full": UNAVAILABLE,
    "storage_failed": UNAVAILABLE,
    "outcome_unknown": UNAVAILABLE,
    "topic_exists": CONFLICT,
    "entry_exists": CONFLICT,
    "incompatible_schema": CONFLICT,
    "invalid_record": CONFLICT,
    "invalid_transaction": CONFLICT,
    "stale_epoch": CONFLICT,
    "refused_repeatedly": REFUSED,
}
"""Exit codes by the `kind` of a client's error or the `code` of a broker's."""


class Entry(NamedTuple):
    """Module and name of a command, and its one-line help."""

    module: str
    name: str
    text: str


COMMANDS: Final[Mapping[str, Entry]] = {
    "serve": Entry("headrace.cli.serve", "serve", "Start the broker."),
    "pub": Entry("headrace.cli.publishing", "pub", "Publish records to a topic."),
    "sub": Entry("headrace.cli.reading", "sub", "Print records of a topic and follow it."),
    "fetch": Entry("headrace.cli.reading", "fetch", "Print records of a topic and exit."),
    "ping": Entry("headrace.cli.ping", "ping", "Check that a broker replies, through any protocol."),
    "status": Entry("headrace.cli.status", "status", "Show the state of a broker on one screen."),
    "top": Entry("headrace.cli.top", "top", "Show a broker as a live screen."),
    "console": Entry("headrace.cli.console", "console", "Start the web console."),
    "context": Entry("headrace.cli.context", "context", "Manage contexts: named brokers with their credentials."),
    "topic": Entry("headrace.cli.topics", "topic", "Manage topics: list, describe, create, alter, delete."),
    "group": Entry("headrace.cli.groups", "group", "Manage groups: list, describe, lag, reset, delete."),
    "schema": Entry("headrace.cli.schemas", "schema", "Manage schemas: list, describe, register, check, delete."),
    "dlq": Entry("headrace.cli.dlq", "dlq", "Manage dead letters: list, fetch, replay, discard, purge."),
    "delayed": Entry("headrace.cli.delayed", "delayed", "Manage delayed messages: list, publish, cancel."),
    "pipeline": Entry("headrace.cli.pipeline", "pipeline", "Run pipelines on Spark: run, check, list, status, stop, archive."),
    "sql": Entry("headrace.cli.sql", "sql", "Run Spark SQL over topics and print the rows."),
    "writer": Entry("headrace.cli.writers", "writer", "Manage exactly-once writers: list, forget."),
    "stage": Entry("headrace.cli.writers", "stage", "Manage staged records of exactly-once writers: list, drop."),
    "user": Entry("headrace.cli.users", "user", "Manage users, their roles and passwords."),
    "acl": Entry("headrace.cli.acls", "acl", "Manage rules and roles: who may do what."),
    "key": Entry("headrace.cli.keys", "key", "Manage API keys."),
    "audit": Entry("headrace.cli.audit", "audit", "Read the audit log: who did what."),
    "config": Entry("headrace.cli.config", "config", "Check, show and explain the configuration."),
    "doctor": Entry("headrace.cli.doctor", "doctor", "Check a configuration and this machine, and say what to do."),
    "certs": Entry("headrace.cli.certs", "certs", "Create development certificates: CA, server, clients."),
    "check": Entry("headrace.cli.offline", "check", "Verify a data directory, offline and read-only."),
    "dump": Entry("headrace.cli.offline", "dump", "Show the content of a log file, offline."),
    "copy": Entry("headrace.cli.copy", "copy", "Copy topics, groups, schemas and users to another broker."),
    "capacity": Entry("headrace.cli.capacity", "capacity", "Plan brokers, Kafka nodes and Spark executors."),
    "bench": Entry("headrace.bench.cli", "bench", "Measure the protocols, and other brokers for comparison."),
    "demo": Entry("headrace.cli.demo", "demo", "Run broker, pipeline and sample traffic together."),
    "completion": Entry("headrace.cli.completion", "completion", "Print the completion script for a shell."),
    "version": Entry("headrace.cli.version", "version", "Show the versions of Headrace and its dependencies."),
}


class LazyGroup(click.Group):
    """Group that imports a command only when it is called."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        entry = COMMANDS.get(cmd_name)
        return None if entry is None else load(entry)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and not args[0].startswith("-"):
            ctx.fail(f"unknown command {args[0]!r}{_nearest(args[0])}")
        return super().resolve_command(ctx, args)

    def invoke(self, ctx: click.Context) -> object:
        try:
            result: object = super().invoke(ctx)
            sys.stdout.flush()
        except BrokenPipeError:
            # The reader closed our output (`headrace sub … | head`): not an error.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except ImportError as failure:
            raise explained(failure, f"headrace {ctx.invoked_subcommand}") from failure.__cause__
        return result

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Complete names without importing commands, to be fast."""
        found = [CompletionItem(name, help=entry.text) for name, entry in COMMANDS.items() if name.startswith(incomplete)]
        return [*found, *click.Command.shell_complete(self, ctx, incomplete)]

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, entry.text) for name, entry in COMMANDS.items()])


def load(entry: Entry) -> click.Command:
    """Import the command. Raises `MissingExtra` if an optional library that it imports is not installed."""
    with needs(f"headrace {entry.name}"):
        command = getattr(importlib.import_module(entry.module), entry.name)
    assert isinstance(command, click.Command), f"{entry.module}.{entry.name} is not a command"
    return command


def _nearest(word: str) -> str:
    import difflib

    found = difflib.get_close_matches(word, COMMANDS, n=1)
    return f"; did you mean {found[0]}?" if found else ""


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="headrace %(version)s")
def cli() -> None:
    """Durable message log with several wire protocols. Acknowledged records are on disk."""


def main(arguments: Sequence[str] | None = None) -> NoReturn:
    """Run one command and exit with its code. A command may return its exit code; None is success."""
    sys.excepthook = _report
    try:
        code = cli.main(args=None if arguments is None else list(arguments), prog_name="headrace", standalone_mode=False)
    except click.UsageError as failure:
        path = failure.ctx.command_path if failure.ctx else "headrace"
        _fail(f"{failure.format_message()} (see {path} --help)", WRONG_USAGE)
    except click.ClickException as failure:
        _fail(failure.format_message(), exit_code(failure.__cause__ or failure))
    except (HeadraceError, OSError) as failure:
        _fail(text_of(failure), exit_code(failure))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def text_of(failure: BaseException) -> str:
    """Return the message of an error. The number of a protocol's error says nothing to a user."""
    return str(getattr(failure, "text", "") or failure)


def exit_code(failure: BaseException) -> int:
    """Return the exit code of a failure."""
    if isinstance(failure, TimeoutError):
        return TOO_SLOW
    if isinstance(failure, MissingExtra):
        return WRONG_USAGE
    failure = getattr(failure, "failure", failure)  # the error of one record of a batch
    kind = getattr(failure, "kind", None) or getattr(failure, "code", None)
    return _KINDS.get(kind, FAILED) if isinstance(kind, str) else FAILED


def one_line(text: str) -> str:
    """Return the text with control characters escaped."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _fail(text: str, code: int) -> NoReturn:
    if os.environ.get("HEADRACE_TRACEBACK") == "1":
        import traceback

        traceback.print_exc()
    print(f"headrace: {one_line(text)}", file=sys.stderr)
    sys.exit(code)


def _report(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
    """Print an unexpected exception as an internal error in one line."""
    hint = " (HEADRACE_TRACEBACK=1 shows where)"
    if os.environ.get("HEADRACE_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(kind, failure, trace)
        hint = ""
    print(f"headrace: internal error: {kind.__name__}: {one_line(str(failure))}{hint}", file=sys.stderr)
