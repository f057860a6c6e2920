"""The links of the documents lead somewhere: relative ones to a file of the repository, #anchors to a heading.

Addresses on the web are not fetched. A link out of the repository (`../shared/...`) is broken for whoever clones it.
"""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
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
