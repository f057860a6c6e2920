"""Parses the command line and runs one command.

Exit codes: 0 done, 1 failed, 2 bad arguments or refused by the cluster, 3 data lost beyond what the code repairs, 4 the
cluster cannot be reached or did not answer, 5 another trainer was lost, 6 this process was taken for lost, 7 a
checkpoint cannot be written or read, 8 this process's memory was damaged, 9 this coordinator is not that of the members
who have found it, 130 interrupted.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import io
import logging
import os
import re
import select
import signal
import sys
from typing import NoReturn, Protocol, TextIO, cast

import torch_ecrec
from torch_ecrec.cli import (
    bench,
    chaos,
    checkpoint,
    checkpoints,
    completion,
    coordinator,
    demo,
    doctor,
    drain,
    experiments,
    output,
    plan,
    rehearse,
    run,
    serve,
    settings,
    status,
    up,
    upgrade,
    warm,
)
from torch_ecrec.compat.argparse import NoEmptyValues, arguments_of, commands_of
from torch_ecrec.errors import ClusterError
from torch_ecrec.processes.limits import explained
from torch_ecrec.runtime.lifetime import (
    INTERRUPTED,
    end_at_once,
    end_with_parent,
    keep_exit_code,
    on_signals,
    pass_over_words_to_scripts,
)
from torch_ecrec.spec.settings import ask_name_servers_briefly

CUT_OFF = 128 + signal.SIGPIPE  # the exit code where nobody reads the rest of the output, as that of most tools


class Command(Protocol):
    """A module of this package that implements a command."""

    HELP: str

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        """Adds the command's arguments to its parser."""

    def run(self, arguments: argparse.Namespace) -> int:
        """Runs the command; returns the exit code."""


COMMANDS: dict[str, Command] = {  # in the order of `--help`
    "demo": demo,
    "chaos": chaos,
    "rehearse": rehearse,
    "run": run,
    "serve": serve,
    "up": up,
    "status": status,
    "drain": drain,
    "upgrade": upgrade,
    "checkpoint": checkpoint,
    "checkpoints": checkpoints,
    "coordinator": coordinator,
    "plan": plan,
    "bench": bench,
    "experiments": experiments,
    "settings": settings,
    "warm": warm,
    "completion": completion,
    "doctor": doctor,
}


class Parser(NoEmptyValues):
    """Says in one line what is wrong with a command line. The usage, a screen of some commands, is in `--help`."""

    def error(self, message: str) -> NoReturn:
        wanted = {"int": "a whole number", "float": "a number"}
        message = re.sub(r"invalid (int|float) value: ", lambda kind: f"{wanted[kind[1]]} is wanted, got ", message)
        self.exit(2, f"{self.prog}: {message}; `{self.prog} --help` says what it takes\n")


def parser(benchmark: str | None = None) -> Parser:
    """Returns the parser of the command line. A benchmark's arguments are in it only if it is named."""
    top = Parser(prog="torch-ecrec", description="Erasure-coded parameter servers for TorchRec.")
    top.add_argument("--version", action="version", version=f"torch-ecrec {torch_ecrec.__version__}")
    commands = top.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name, command in COMMANDS.items():
        one = commands.add_parser(name, help=command.HELP, description=f"{command.HELP[:1].upper()}{command.HELP[1:]}.")
        if name == "bench":
            bench.add_arguments(one, benchmark)
        else:
            command.add_arguments(one)
    commands.choices["completion"].set_defaults(top=top)  # which prints what all of them take
    return top


def main(argv: list[str] | None = None) -> int:
    """Runs the command in `argv`, or in the process's own command line. Entry point of the console script."""
    if argv is None:
        _open_standard_streams()
        output.name_errors()
    try:
        code = _run(argv)
        if sys.stdout is not None:
            sys.stdout.flush()
        return code
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError as error:
        if not _is_cut_off(sys.stdout):
            return _fail(error, 2)
        output.drop_rest()
        return CUT_OFF
    except ClusterError as error:
        return _fail(error, error.exit_code)
    except OSError as error:
        if error.filename != output.NAME:
            return _fail(explained(error), 2)
        output.drop_rest()
        return _fail(error, 1)
    except MemoryError as error:
        return _fail(MemoryError(f"there is not enough memory: {error}".removesuffix(": ")), 2)
    except RuntimeError as error:
        if (told := explained(error)) is error:
            raise
        return _fail(told, 1)
    except (ValueError, TypeError, OverflowError) as error:
        return _fail(error, 2)
    except ImportError as error:
        return _fail(_lacking(error), 1)


def _is_worth_a_line(record: logging.LogRecord) -> bool:
    """Not what FBGEMM says of each of its 14 libraries, that it has loaded it."""
    return record.levelno > logging.INFO or "fbgemm_gpu" not in record.pathname


def _run(argv: list[str] | None) -> int:
    """Runs the command; returns its exit code."""
    words = sys.argv[1:] if argv is None else argv
    _require_folder()
    if (mistake := _misspelt(words)) is not None:
        raise ValueError(mistake)
    top = parser(bench.named_in(words))
    arguments, unknown = _parsed(top, argv)
    if unknown:
        raise ValueError(_unknown(top, words, unknown[0]))
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    for handler in logging.getLogger().handlers:
        handler.addFilter(_is_worth_a_line)
    if argv is None:
        keep_exit_code()
        ask_name_servers_briefly()
    if getattr(arguments, "end_with_parent", False):
        end_with_parent(arguments.parent_tells)
    if argv is None and hasattr(arguments, "end_with_parent"):
        pass_over_words_to_scripts()
        on_signals(end_at_once)  # until they have something to leave in order: loading torch alone takes seconds
    return COMMANDS[arguments.command].run(arguments)


def _parsed(top: Parser, argv: list[str] | None) -> tuple[argparse.Namespace, list[str]]:
    """Returns arguments, and what is unknown. What `--help` prints is printed here: argparse passes over its errors."""
    with contextlib.redirect_stdout(io.StringIO()) as told:
        try:
            return top.parse_known_args(argv)
        except SystemExit as ended:
            code = ended.code
    print(told.getvalue(), end="", flush=True)
    sys.exit(code)


def _is_cut_off(stream: TextIO) -> bool:
    """Returns whether nobody reads any more what is written there: `| head` has read enough."""
    poll = select.poll()
    try:
        poll.register(stream, 0)
    except (OSError, ValueError):  # no file
        return False
    return any(event & select.POLLERR for _, event in poll.poll(0))


def _open_standard_streams() -> None:
    """Opens the standard streams that whoever started this process has closed (`2>&-`): for nothing to read or keep.

    Else the next file or connection has the number of one, and gets what a library says; and there is no `sys.stderr`.
    """
    while (file := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(file, True)
    os.close(file)
    for number, name in enumerate(("stdin", "stdout", "stderr")):
        if getattr(sys, name) is None:
            stream = open(number, "w" if number else "r", closefd=False)  # noqa: SIM115
            setattr(sys, name, stream)
            setattr(sys, f"__{name}__", stream)


def _require_folder() -> None:
    """Raises ValueError where the folder in which this process is was removed: torch does not load there, and what
    it says then names its own files."""
    try:
        os.getcwd()
    except FileNotFoundError:
        raise ValueError("the folder in which this was started is gone: start it in another one") from None


def _misspelt(words: list[str]) -> str | None:
    """Returns a suggestion for a misspelt command; None if no command is like it: argparse then lists all."""
    named = next((word for word in words if not word.startswith("-")), None)
    near = difflib.get_close_matches(named, COMMANDS, 1) if named is not None and named not in COMMANDS else []
    return f"there is no command {named}; did you mean `torch-ecrec {near[0]}`?" if near else None


def _unknown(top: Parser, words: list[str], word: str) -> str:
    """Returns an error for an argument that a command does not take, with the option that was perhaps meant."""
    name, command = "torch-ecrec", cast(argparse.ArgumentParser, top)
    for one in words:
        inner = {known: parser for known, parser, _ in commands_of(command)}
        if one in inner:
            name, command = f"{name} {one}", inner[one]
    if not word.startswith("-"):
        return f"`{name}` takes no argument {word}; `{name} --help` says what it takes"
    options = [option for argument in arguments_of(command) for option in argument.names]
    near = difflib.get_close_matches(word.partition("=")[0], options, 1)
    meant = f"did you mean {near[0]}?" if near else f"`{name} --help` lists all"
    return f"there is no option {word} of `{name}`; {meant}"


def _lacking(error: ImportError) -> ImportError:
    """Returns the error with what to do, if it is a package that the extra `demo` brings, or one that has no room."""
    if "failed to map segment" in str(error):
        return ImportError(f"there is not enough memory (`ulimit -v`?): {error}")
    name = (error.name or "").partition(".")[0]
    if name not in ("matplotlib", "psutil"):
        return error
    return ImportError(f"this needs the package {name}: pip install 'torch-ecrec[demo]'")


def _fail(error: Exception, code: int) -> int:
    with contextlib.suppress(OSError):  # no room for it: the code says enough
        over = "\r\x1b[K" if sys.stderr.isatty() else ""  # a line of progress, perhaps
        told = re.sub(r"^\[Errno \d+\] ", "", str(error))
        print(f"{over}torch-ecrec: {told}", file=sys.stderr, flush=True)
    return code
