"""`headrace completion`: what a shell needs to complete commands and options."""

from __future__ import annotations

from typing import Final

import click
from click.shell_completion import ShellComplete, get_completion_class

_VARIABLE: Final = "_HEADRACE_COMPLETE"
"""What the scripts ask by: click answers instead of running the command."""


@click.command(
    epilog="""\b
bash   eval "$(headrace completion bash)"     in ~/.bashrc
zsh    eval "$(headrace completion zsh)"      in ~/.zshrc, after compinit
fish   headrace completion fish > ~/.config/fish/completions/headrace.fish
"""
)
@click.argument("shell", type=click.Choice(["bash", "zsh", "fish"]))
def completion(shell: str) -> None:
    """Print the script that lets a shell complete commands.

    Options and their values are completed as well.
    """
    from headrace.cli import cli

    kind = get_completion_class(shell)
    assert kind is not None, "click knows these shells"
    # The script alone: click would also start bash to ask how old it is.
    click.echo(ShellComplete.source(kind(cli, {}, "headrace", _VARIABLE)))
