"""`torch-ecrec settings`: all variables of the environment that are read, what each is here, and what it means."""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import textwrap

from torch_ecrec.spec.settings import OTHERS, PREFIX, Settings

HELP = "print every setting: its value here, its default and its meaning"
WIDTH = 100


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `settings`."""
    parser.add_argument("name", nargs="?", metavar="NAME", help="tell of this one: lease_s, or TORCH_ECREC_LEASE_S")


def run(arguments: argparse.Namespace) -> int:
    """Prints all of them, or one, with its meaning."""
    here, explained = Settings.from_environment(), Settings.explained()  # a misspelt or bad one is refused
    if arguments.name is not None:
        name = arguments.name.upper().removeprefix(PREFIX)
        known = {field.name.upper(): field for field in dataclasses.fields(Settings)}
        if name not in known and name not in OTHERS:
            near = difflib.get_close_matches(name, [*known, *OTHERS], 1)
            meant = f"did you mean {near[0].lower()}?" if near else "`torch-ecrec settings` lists them"
            raise ValueError(f"there is no setting {arguments.name}; {meant}")
        meaning = explained[name.lower()] if name in known else OTHERS[name]
        print(f"{PREFIX}{name}{_now(name, here)}\n\n{textwrap.fill(meaning, WIDTH)}")
        return 0
    from torch_ecrec.observe.words import table

    rows = [["variable", "here", "default"]]
    for field in dataclasses.fields(Settings):
        name = PREFIX + field.name.upper()
        rows.append([name, shown(getattr(here, field.name)), shown(field.default)])
    rows += [[PREFIX + name, value or "-", "-"] for name, value in Settings.others().items()]
    width = max(len(row[0]) for row in rows)
    told = ["", *("" if row[1] == row[2] else "changed" for row in rows[1:])]
    rows = [[row[0].ljust(width), *row[1:], said] for row, said in zip(rows, told, strict=True)]
    print("\n".join(table(rows, indent="")))
    print("\nwhat one means: torch-ecrec settings NAME; all of them: docs/reference.md")
    return 0


def shown(value: object) -> str:
    """A setting's value; what is nothing is "-"."""
    if value is None or value == "":
        return "-"
    return f"{value:,.10g}" if isinstance(value, (int, float)) else str(value)


def _now(name: str, here: Settings) -> str:
    field = next((field for field in dataclasses.fields(Settings) if field.name.upper() == name), None)
    if field is None:
        return ""
    value, default = shown(getattr(here, field.name)), shown(field.default)
    return f" = {value}" + (f" (by default {default})" if value != default else " (the default)")
