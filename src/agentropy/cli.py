"""The `agentropy` command: one module in `commands/` a subcommand, each with `register(subparsers)`.

Only argparse is imported here, so `agentropy --help` answers at once; a command imports what it needs when it runs.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib
import io
import logging
import os
import sys
from collections.abc import Sequence

from agentropy.errors import UserError

# The order is that of the help page.
COMMANDS = (
    "train",
    "launch",
    "view",
    "report",
    "study",
    "eval",
    "compare",
    "analyze",
    "show",
    "shape",
    "grade",
    "tasks",
    "warm_start",
    "sandbox",
    "doctor",
)


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Faults of a file that was named, never of the program.
OF_THE_PATH = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP, errno.EIO, errno.ESTALE)


def build_parser() -> argparse.ArgumentParser:
    """The parser with every subcommand registered."""
    parser = argparse.ArgumentParser(
        prog="agentropy",
        description="Entropy-guided reinforcement learning for tool-using language-model agents.",
    )
    parser.add_argument("--version", action="store_true", help="print the version and leave")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND")
    for name in COMMANDS:
        importlib.import_module(f"agentropy.commands.{name}").register(subparsers)
    return parser


def _parse(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> argparse.Namespace:
    args, extra = parser.parse_known_args(argv)
    if extra and not getattr(args, "takes_extra", False):
        parser.error(f"unrecognized arguments: {' '.join(extra)}")
    args.extra = extra
    return args


def _ends_at_once(parser: argparse.ArgumentParser, argv: Sequence[str] | None) -> bool:
    """Whether these arguments only print something, or are wrong."""
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
        try:
            args = _parse(parser, argv)
        except SystemExit:
            return True
    return bool(args.version or args.command != "train" or args.list_options)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0 done, 1 the work failed, 2 the input was wrong, 130 interrupted."""
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # what a terminal cannot write must not end the work
            stream.reconfigure(errors="backslashreplace")
    parser = build_parser()
    torchrun = "TORCHELASTIC_RUN_ID" in os.environ and os.environ.get("WORLD_SIZE") != "1"
    if torchrun and os.environ.get("RANK", "0") != "0" and _ends_at_once(parser, argv):
        return 0  # the first process says it
    args = _parse(parser, argv)
    if args.version:
        from agentropy import __version__

        print(f"agentropy {__version__}")
        return 0
    if args.command is None:
        parser.print_help()
        return 2
    try:
        if torchrun and args.command != "train":
            raise UserError("torchrun starts `agentropy train` only; other commands run once, without it")
        return int(args.run(args) or 0)
    except UserError as error:
        print(f"agentropy {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        # What was under way dies with it, and asyncio would show each task's traceback.
        logging.getLogger("asyncio").setLevel(logging.CRITICAL + 1)
        return 130
    except BrokenPipeError:  # `agentropy shape … | head` is no error
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except OSError as error:
        if error.errno in DISK_FULL:
            where = f" at {error.filename}" if error.filename else ""
            what = f"the disk is full{where}; free some space and run again"
        elif error.errno in OF_THE_PATH and error.filename is not None:
            what = f"cannot use {error.filename}: {error.strerror}"
        else:
            raise
        print(f"agentropy {args.command}: {what}", file=sys.stderr)
        return 2


if __name__ == "__main__":
    sys.exit(main())
