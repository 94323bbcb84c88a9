"""The command line: one group whose commands are imported when they are called.

`headrace --help` must answer at once, so this module imports nothing but click, and the table below repeats the one-line help
of each command (a test compares it with the command's own). Data goes to stdout, talk to stderr.

Exit codes: 0 done, 1 failed, 2 wrong usage or an extra that is not installed, 3 not found, 4 not allowed, 5 no broker to be reached
or none that can do it now, 6 too slow, 7 in conflict with what is there, 130 interrupted. An error is one line,
`headrace: …`; with HEADRACE_TRACEBACK=1 its traceback precedes it.
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

FAILED, WRONG_USAGE, NOT_FOUND, NOT_ALLOWED, UNAVAILABLE, TOO_SLOW, CONFLICT, INTERRUPTED = 1, 2, 3, 4, 5, 6, 7, 130
_EXIT_CODES: Final[Mapping[str, int]] = {
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
    "disk_full": UNAVAILABLE,
    "storage_failed": UNAVAILABLE,
    "topic_exists": CONFLICT,
    "entry_exists": CONFLICT,
    "incompatible_schema": CONFLICT,
    "invalid_record": CONFLICT,
    "invalid_transaction": CONFLICT,
    "stale_epoch": CONFLICT,
}
"""By the `kind` of a client's error, or the `code` of the broker's."""


class Entry(NamedTuple):
    """Where a command lives, and what it does in one line."""

    module: str
    name: str
    text: str


COMMANDS: Final[Mapping[str, Entry]] = {
    "serve": Entry("headrace.cli.serve", "serve", "Start the broker."),
    "pub": Entry("headrace.cli.pubsub", "pub", "Publish records to a topic."),
    "sub": Entry("headrace.cli.pubsub", "sub", "Read records of a topic, then follow it."),
    "fetch": Entry("headrace.cli.pubsub", "fetch", "Print records that a topic holds, and end."),
    "ping": Entry("headrace.cli.ping", "ping", "Ask a broker for one answer, through any protocol."),
    "topic": Entry("headrace.cli.topics", "topic", "Manage topics: list, describe, create, alter, delete."),
    "group": Entry("headrace.cli.groups", "group", "Manage groups: list, describe, lag, reset, delete."),
    "schema": Entry("headrace.cli.schemas", "schema", "Manage schemas: list, describe, register, check, delete."),
    "dlq": Entry("headrace.cli.dlq", "dlq", "Manage dead letters: list, fetch, replay, purge."),
    "delayed": Entry("headrace.cli.delayed", "delayed", "Manage delayed messages: list, publish, cancel."),
    "pipeline": Entry("headrace.cli.pipeline", "pipeline", "Run pipelines on Spark: run, check, list, status, stop, archive."),
    "sql": Entry("headrace.cli.sql", "sql", "Run Spark SQL over topics and print the rows."),
    "writer": Entry("headrace.cli.writers", "writer", "Manage exactly-once writers: list, forget."),
    "stage": Entry("headrace.cli.writers", "stage", "Manage what exactly-once writers have staged: list, drop."),
    "user": Entry("headrace.cli.users", "user", "Manage users, their roles and passwords."),
    "acl": Entry("headrace.cli.acls", "acl", "Manage rules and roles: who may do what."),
    "key": Entry("headrace.cli.keys", "key", "Manage API keys."),
    "audit": Entry("headrace.cli.audit", "audit", "Read the audit log: who did what."),
    "config": Entry("headrace.cli.config", "config", "Check, show and explain the configuration."),
    "certs": Entry("headrace.cli.certs", "certs", "Make certificates for development: a CA, a server's, clients'."),
    "check": Entry("headrace.cli.offline", "check", "Verify a data directory, offline and read-only."),
    "dump": Entry("headrace.cli.offline", "dump", "Show what a log file holds, offline."),
    "bench": Entry("headrace.bench.cli", "bench", "Measure the protocols, and other brokers for comparison."),
    "demo": Entry("headrace.cli.demo", "demo", "Run everything at once, with sample orders."),
    "completion": Entry("headrace.cli.completion", "completion", "Print the script that lets a shell complete commands."),
    "version": Entry("headrace.cli.version", "version", "Show the version of Headrace and of what it runs on."),
}


class LazyGroup(click.Group):
    """Knows its commands by name; imports one when it is called, all of them only for their own help."""

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
            # The reader of our output is gone (`headrace sub … | head`): that is its right, and no news.
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return 0
        except ImportError as failure:
            raise explained(failure, f"headrace {ctx.invoked_subcommand}") from failure.__cause__
        return result

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Names and texts are known without importing a command: whoever presses the tabulator waits for it."""
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
    return f"; did you mean {found[0]}?" if found else "; see headrace --help"


@click.group(cls=LazyGroup, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 120})
@click.version_option(__version__, message="headrace %(version)s")
def cli() -> None:
    """A durable message log that speaks several wire protocols: acknowledged means on disk."""


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
        _fail(str(failure), exit_code(failure))
    except (click.Abort, KeyboardInterrupt):
        sys.exit(INTERRUPTED)
    sys.exit(code if isinstance(code, int) else 0)


def exit_code(failure: BaseException) -> int:
    """What kind of failure this is, for scripts."""
    if isinstance(failure, TimeoutError):
        return TOO_SLOW
    if isinstance(failure, MissingExtra):
        return WRONG_USAGE
    kind = getattr(failure, "kind", None) or getattr(failure, "code", None)
    return _EXIT_CODES.get(kind, FAILED) if isinstance(kind, str) else FAILED


def one_line(text: str) -> str:
    """The text with what a terminal would act on made visible."""
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode("ascii") for char in text)


def _fail(text: str, code: int) -> NoReturn:
    if os.environ.get("HEADRACE_TRACEBACK") == "1":
        import traceback

        traceback.print_exc()
    print(f"headrace: {one_line(text)}", file=sys.stderr)
    sys.exit(code)


def _report(kind: type[BaseException], failure: BaseException, trace: TracebackType | None) -> None:
    """What nobody foresaw is a defect of ours: say so in one line, and how to see more."""
    hint = " (HEADRACE_TRACEBACK=1 shows where)"
    if os.environ.get("HEADRACE_TRACEBACK") == "1":
        import traceback

        traceback.print_exception(kind, failure, trace)
        hint = ""
    print(f"headrace: internal error: {kind.__name__}: {one_line(str(failure))}{hint}", file=sys.stderr)
