"""All settings and all commands as a page of Markdown: made from the code alone.

python -m torch_ecrec.cli.reference > docs/reference.md
"""

from __future__ import annotations

import argparse
import dataclasses

from torch_ecrec.cli.main import parser
from torch_ecrec.cli.settings import shown
from torch_ecrec.compat.argparse import Argument, arguments_of, commands_of
from torch_ecrec.spec.settings import OTHERS, PREFIX, Settings

HEAD = """# Reference

`python -m torch_ecrec.cli.reference` makes this page. Do not edit it by hand.

## Settings

Every process reads these environment variables when it starts. It refuses a misspelt one, and names the nearest.
`torch-ecrec settings` shows the value of each on this machine. Times are in seconds, sizes in bytes.

| variable | default | meaning |
|---|---|---|
"""
COMMANDS = """## Commands

Your shell completes commands, options and files once it reads the output of `torch-ecrec completion` (`pip install
'torch-ecrec[completion]'`):

    torch-ecrec completion bash > ~/.local/share/bash-completion/completions/torch-ecrec
    torch-ecrec completion zsh > DIR/_torch-ecrec      # DIR: a folder of $fpath, before compinit"""
BY_MACHINE = ("rebuild_bytes_per_s", "move_bytes_per_s")  # their default is not the same everywhere


def reference() -> str:
    """Returns the page `docs/reference.md`, made from settings and parsers."""
    explained = Settings.explained()
    rows = [
        _row(f"`{PREFIX}{field.name.upper()}`", _default(field.name, field.default), explained[field.name])
        for field in dataclasses.fields(Settings)
    ]
    rows += [_row(f"`{PREFIX}{name}`", "-", meaning) for name, meaning in OTHERS.items()]
    return "\n".join([HEAD + "\n".join(rows), "", COMMANDS, *_commands(parser(), "torch-ecrec")]) + "\n"


def _default(name: str, value: object) -> str:
    if name in BY_MACHINE:
        return "by cores"
    return "-" if shown(value) == "-" else f"`{shown(value)}`"


def _commands(of: argparse.ArgumentParser, prefix: str) -> list[str]:
    lines = []
    for name, command, meaning in commands_of(of):
        lines += ["", f"### {prefix} {name}", "", _cell(_sentence(meaning))]
        if arguments := arguments_of(command):
            rows = [_row(_named(one), _said_default(one), one.meaning) for one in arguments]
            lines += ["", "| argument | default | meaning |", "|---|---|---|", *rows]
        lines += _commands(command, f"{prefix} {name}")
    return lines


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{text[1:]}{'' if text[-1:] in '.?!' else '.'}"


def _named(argument: Argument) -> str:
    names = [f"{name} {argument.value}".strip() for name in argument.names] or [argument.value]
    return ", ".join(f"`{name}`" for name in names)


def _said_default(argument: Argument) -> str:
    """ "-" where there is none, or the meaning says it: of some it depends on the machine."""
    return "-" if argument.default is None or "default" in argument.meaning else f"`{argument.default}`"


def _row(*cells: str) -> str:
    return f"| {' | '.join(map(_cell, cells))} |"


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", r"\|").replace("<", "&lt;")


if __name__ == "__main__":
    print(reference(), end="")
