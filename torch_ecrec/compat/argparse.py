"""What a parser of `argparse` has been given, which it tells nobody: its commands and their arguments. And a parser
that refuses empty values."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any


@dataclass(frozen=True)
class Argument:
    """One argument of a command.

    Attributes:
        names: its options; none: it is told by its place.
        value: what stands for its value; "": it takes none.
        default: None: there is none.
        meaning: its help.
    """

    names: tuple[str, ...]
    value: str
    default: object
    meaning: str


class NoEmptyValues(argparse.ArgumentParser):
    """Refuses an empty value of an option, by the option's name: `--restore "$URL"` without such a variable.

    A path would be the folder where the command runs, and other words would be as if they were not there.
    """

    def _get_values(self, action: argparse.Action, arg_strings: list[str]) -> Any:
        shown = action.option_strings and action.help != argparse.SUPPRESS  # others are of one process to another
        if "" in arg_strings and shown and action.type in (None, Path):
            raise argparse.ArgumentError(action, "a value is wanted, and this one is empty")
        return super()._get_values(action, arg_strings)


def commands_of(parser: argparse.ArgumentParser) -> list[tuple[str, argparse.ArgumentParser, str]]:
    """Returns the commands of a parser: the name, the parser and the help of each."""
    found = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            helps = {choice.dest: choice.help or "" for choice in action._choices_actions}
            found += [(name, command, helps.get(name, "")) for name, command in action.choices.items()]
    return found


def arguments_of(parser: argparse.ArgumentParser) -> list[Argument]:
    """Returns the arguments of a command, but for --help and what has no help on purpose."""
    return [
        Argument(tuple(action.option_strings), _value(action), _default(action), _help(action))
        for action in parser._actions
        if action.help != argparse.SUPPRESS
        and not isinstance(action, (argparse._HelpAction, argparse._VersionAction, argparse._SubParsersAction))
    ]


def _value(action: argparse.Action) -> str:
    if action.nargs == 0:
        return ""
    if isinstance(action.metavar, str):
        return action.metavar
    return "|".join(map(str, action.choices)) if action.choices else action.dest.upper()


def _default(action: argparse.Action) -> object:
    return None if action.nargs == 0 or action.default in ("", argparse.SUPPRESS, [], ()) else action.default


def _help(action: argparse.Action) -> str:
    text = action.help or ""
    return text % {"default": action.default, "prog": "torch-ecrec"} if "%" in text else text


def complete_files(parser: argparse.ArgumentParser, of: object, files: object) -> None:
    """Has a shell complete names of files for the arguments of a parser, and of its commands, that are of one type.

    Args:
        parser: is changed.
        of: the type of such an argument.
        files: what shtab takes for it.
    """
    for action in parser._actions:
        if action.type is of:
            action.complete = files  # type: ignore[attr-defined]  # where shtab looks
    for _, command, _ in commands_of(parser):
        complete_files(command, of, files)
