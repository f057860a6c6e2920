"""`torch-ecrec completion SHELL`: prints what makes a shell complete commands, options and files. shtab makes it.

torch-ecrec completion bash > ~/.local/share/bash-completion/completions/torch-ecrec
torch-ecrec completion zsh > DIR/_torch-ecrec           # DIR: one of $fpath
"""

from __future__ import annotations

import argparse
import importlib.util
from pathlib import Path

from torch_ecrec.compat.argparse import complete_files

HELP = "print a script by which a shell completes commands and options (bash, zsh)"
SHELLS = ("bash", "zsh")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the arguments of `completion`."""
    parser.add_argument("shell", choices=SHELLS, help="docs/reference.md says where it goes")


def run(arguments: argparse.Namespace) -> int:
    """Prints the completions of all commands: of `arguments.top`, the parser of them all."""
    if importlib.util.find_spec("shtab") is None:
        raise ValueError("completion needs shtab: pip install 'torch-ecrec[completion]'")
    import shtab

    top: argparse.ArgumentParser = arguments.top
    complete_files(top, Path, shtab.FILE)
    print(shtab.complete(top, shell=arguments.shell), flush=True)
    return 0
