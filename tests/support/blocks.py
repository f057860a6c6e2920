"""Code in documents: fenced blocks, and the indented ones, which are commands."""

import re
from pathlib import Path

FENCED = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"(?:^\n|\A)((?:^ {4}.*\n|^\n(?= {4}))+)", re.MULTILINE)


def fenced(document: Path, kind: str) -> list[str]:
    """The blocks of one kind ("python", "bash", "diff"), in their order."""
    return [code for _, this, code in FENCED.findall(document.read_text(encoding="utf-8")) if this == kind]


def commands(document: Path) -> list[str]:
    """Each command line that starts with a program of ours, of indented and of bash blocks, continued lines joined."""
    text = document.read_text(encoding="utf-8")
    blocks = [*INDENTED.findall(FENCED.sub("", text)), *fenced(document, "bash")]
    lines = [line.strip() for block in blocks for line in block.replace("\\\n", " ").splitlines()]
    return [line for line in lines if re.match(r"(\w+=\S+ )*(torch-ecrec|torchrun) ", line)]
