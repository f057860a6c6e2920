"""The links of the documents lead somewhere: relative ones to a file of the repository, #anchors to a heading; and
what the guides name of the code is there.

Addresses on the web are not fetched. A link out of the repository (`../shared/...`) is broken for whoever clones it.
"""

import ast
import functools
import re
from pathlib import Path

import pytest
from places import ROOT
from test_architecture import RANKS

DOCUMENTS = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")])

LINK = re.compile(r"\]\(\s*<?([^)\s>]+)>?(?:\s+\"[^\"]*\")?\s*\)")
REFERENCE = re.compile(r"^\[[^\]]+\]:\s*<?(\S+?)>?\s*$", re.MULTILINE)
HEADING = re.compile(r"^#{1,6}\s+(.*?)\s*#*\s*$", re.MULTILINE)
CODE = re.compile(r"^(```|~~~).*?^\1", re.MULTILINE | re.DOTALL)


def links(text: str) -> list[str]:
    """Targets of a document's links and images, those in code left out."""
    text = re.sub(r"`[^`\n]*`", "", CODE.sub("", text))
    return [*LINK.findall(text), *REFERENCE.findall(text)]


def anchors(text: str) -> set[str]:
    """The names that GitHub gives a document's headings."""
    found: set[str] = set()
    for title in HEADING.findall(CODE.sub("", text)):
        title = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", title)
        base = re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")
        name, number = base, 0
        while name in found:
            number += 1
            name = f"{base}-{number}"
        found.add(name)
    return found


def broken(document: Path, root: Path = ROOT) -> list[str]:
    """The document's links that lead nowhere, each with its reason."""
    errors = []
    for link in links(document.read_text(encoding="utf-8")):
        if re.match(r"[a-z][a-z0-9+.-]*:", link, re.IGNORECASE):
            continue
        place, _, anchor = link.partition("#")
        target = (document.parent / place).resolve() if place else document
        if not target.is_relative_to(root):
            errors.append(f"{link}: outside the repository")
        elif not target.exists():
            errors.append(f"{link}: no such file")
        elif anchor and target.suffix == ".md" and anchor not in anchors(target.read_text(encoding="utf-8")):
            errors.append(f"{link}: no such heading")
    return errors


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_resolve(document: Path) -> None:
    assert not broken(document)


def test_a_broken_link_is_found(tmp_path: Path) -> None:
    text = "# A `b`: c\n[x](docs/none.md) [z](#a-b-c)\n```\n[no](no.md)\n```\n`[no](no.md)`\n[r]: other.md\n"
    assert links(text) == ["docs/none.md", "#a-b-c", "other.md"]
    assert anchors(text) == {"a-b-c"}
    document = tmp_path / "d.md"
    document.write_text("# A\n[b](none.md) [c](#a) [d](https://example.org/none) ", encoding="utf-8")
    assert broken(document, root=tmp_path) == ["none.md: no such file"]
    document.write_text("# A\n[b](#b) [c](../d.md)\n", encoding="utf-8")
    assert broken(document, root=tmp_path) == ["#b: no such heading", "../d.md: outside the repository"]


def test_the_readme_is_read_in_a_few_minutes() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 800


# --- names of the code -----------------------------------------------------------------------------------------------

GUIDES = [ROOT / "CONTRIBUTING.md", ROOT / "docs" / "architecture.md", ROOT / "docs" / "contributing" / "glossary.md"]
FILE = re.compile(r"(?<![\w/])([\w/]+\.py)(?::([\w.]*\w))?")
MEMBER = re.compile(r"(?<![\w./:])([A-Z][A-Za-z]+)\.([a-z_]\w*)\b(?!\.md)")  # Class.method, wherever the class lives


def names_in(tree: ast.Module) -> set[str]:
    """Functions, classes, constants, and `Class.member` of classes: methods, properties and fields."""
    found: set[str] = set()
    for node in tree.body:
        if isinstance(node, ast.Assign):
            found |= {target.id for target in node.targets if isinstance(target, ast.Name)}
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            found.add(node.target.id)
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        if isinstance(node, ast.ClassDef):
            for inner in ast.walk(node):
                if isinstance(inner, ast.FunctionDef | ast.AsyncFunctionDef):
                    found.add(f"{node.name}.{inner.name}")
                elif isinstance(inner, ast.AnnAssign) and isinstance(inner.target, ast.Name):
                    found.add(f"{node.name}.{inner.target.id}")
                elif isinstance(inner, ast.Attribute) and isinstance(inner.ctx, ast.Store):
                    found.add(f"{node.name}.{inner.attr}")
    return found


@functools.cache
def code_names() -> dict[str, set[str]]:
    """The names in each file, read when a test first asks: each process that runs tests imports this file."""
    return {
        str(path.relative_to(ROOT)): names_in(ast.parse(path.read_text(encoding="utf-8")))
        for folder in ("torch_ecrec", "tests", "examples")
        for path in (ROOT / folder).rglob("*.py")
    } | {"setup.py": set()}


def unknown_names(text: str) -> list[str]:
    """What a guide names that is not there: `path.py`, as in the repository or below torch_ecrec; `path.py:name`;
    `Class.member` of any class of the package. NAME stands for any name."""
    members = set().union(*(names for path, names in code_names().items() if path.startswith("torch_ecrec/")))
    missing = []
    for path, name in FILE.findall(text):
        there = next((at for at in (path, f"torch_ecrec/{path}") if at in code_names()), None)
        if "NAME" in path:
            continue
        if there is None or (name and name not in code_names()[there]):
            missing.append(f"{path}:{name}" if name else path)
    return missing + [f"{cls}.{name}" for cls, name in MEMBER.findall(text) if f"{cls}.{name}" not in members]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda path: path.name)
def test_what_a_guide_names_is_there(guide: Path) -> None:
    text = guide.read_text(encoding="utf-8")
    assert FILE.search(text)
    assert not unknown_names(text)


def test_the_architecture_has_every_room_with_its_rank() -> None:
    rows = re.findall(
        r"^\| (\d+) \| `(\w+)(?:\.py)?` \|", (ROOT / "docs/architecture.md").read_text("utf-8"), re.MULTILINE
    )
    not_rooms = ("__init__", "examples")
    assert {room: int(rank) for rank, room in rows} == {r: n for r, n in RANKS.items() if r not in not_rooms}


def test_a_name_that_is_gone_is_found() -> None:
    text = "`layout/stripes.py:Layout.locate` tests/unit/test_docs.py `StepRule.settled` StepRule.applied"
    assert not unknown_names(text)
    text = "`layout/none.py`, layout/stripes.py:None_, `layout/stripes.py:Layout.none`, StepRule.none"
    wanted = ["layout/none.py", "layout/stripes.py:None_", "layout/stripes.py:Layout.none", "StepRule.none"]
    assert unknown_names(text) == wanted
