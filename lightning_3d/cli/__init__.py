"""The command ``lightning-3d``: one module per subcommand, imported when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from lightning_3d.cli.starts import refuse_starts
from lightning_3d.errors import Lightning3DError

COMMANDS = {
    "train": "train a recipe's model on its data",
    "verify": "compare layouts with one process on the same data",
    "export": "write a checkpoint as a Hugging Face folder, a plain .ckpt or .safetensors",
    "generate": "write text with the model of a checkpoint",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a subcommand; the result is the exit code: 2 for a mistake in the call, told in one line."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(_help())
        return 0
    command, *rest = arguments
    if command in ("-V", "--version"):
        from lightning_3d import __version__

        print(f"lightning-3d {__version__}")
        return 0
    if command not in COMMANDS:
        print(f"error: no command {command!r}. Commands: {', '.join(COMMANDS)}.", file=sys.stderr)
        return 2
    try:
        if command != "train":
            refuse_starts(command)
        return importlib.import_module(f"lightning_3d.cli.{command}").main(rest)
    except Lightning3DError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2


def _help() -> str:
    lines = [f"  {name:<10} {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: lightning-3d COMMAND [key=value ...]",
            "",
            "commands:",
            *lines,
            "",
            "lightning-3d COMMAND --help tells more.",
        ]
    )
