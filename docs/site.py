"""What MkDocs is told beside mkdocs.yml, so that documents written for GitHub are pages of a site as they stand.

A link out of docs/ (`../examples/two_tower.py`, `../CONTRIBUTING.md`) leads to a page `repository/...` that is made of
that file, or that lists that folder. Links within code are left alone. Nothing is fetched.
"""

import posixpath
import re
from collections.abc import Callable
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).resolve().parent.parent
MADE = "repository/"  # where pages are that are made of files outside docs/
CODE = re.compile(r"^(?:```|~~~).*?^(?:```|~~~)\s*$|`[^`\n]+`", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"(\]\()([^)\s#]+)((?:#[^)\s]*)?\))")
ON_THE_WEB = re.compile(r"[a-z][a-z0-9+.-]*:", re.IGNORECASE)
LANGUAGES = {".py": "python", ".yml": "yaml", ".json": "json", ".toml": "toml"}


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Adds a page for each file or folder outside docs/ that a page links to."""
    waiting = {f"docs/{file.src_uri}" for file in files if file.is_documentation_page()}
    seen = set(waiting)
    while waiting:
        source = waiting.pop()
        text, targets = _page(source)
        if not source.startswith("docs/"):
            files.append(File.generated(config, _uri(source), content=text))
        waiting |= targets - seen
        seen |= targets
    return files


def on_page_markdown(markdown: str, *, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Points the links of a page of docs/ at the pages that `on_files` has made."""
    uri = page.file.src_uri
    return markdown if uri.startswith(MADE) else _relinked(markdown, f"docs/{uri}")[0]


def _uri(path: str) -> str:
    """The page of the site for a path in the repository: "docs/hosts.md" -> "hosts.md"."""
    if path.startswith("docs/"):
        return path.removeprefix("docs/")
    return MADE + (path if path.endswith(".md") else f"{path}.md")


def _page(source: str) -> tuple[str, set[str]]:
    """The text of the page for a path in the repository, and which other paths outside docs/ it links to."""
    path = ROOT / source
    if path.is_dir():
        inner = sorted(f"{source}/{one.name}" for one in path.iterdir() if one.is_file())
        list_of = "\n".join(f"- [{one}]({posixpath.basename(source)}/{posixpath.basename(_uri(one))})" for one in inner)
        return f"# {source}\n\n{list_of}\n", set(inner)
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".md":
        return _relinked(text, source)
    return f"# {source}\n\n~~~ {LANGUAGES.get(path.suffix, 'text')}\n{text}~~~\n", set()


def _relinked(markdown: str, source: str) -> tuple[str, set[str]]:
    """A document with its links as they are on the site, and the paths outside docs/ that they lead to."""
    outside: set[str] = set()

    def moved(match: re.Match[str]) -> str:
        target = posixpath.normpath(posixpath.join(posixpath.dirname(source), match[2]))
        if ON_THE_WEB.match(match[2]) or not (ROOT / target).exists():
            return match[0]
        if not target.startswith("docs/"):
            outside.add(target)
        elif not target.endswith(".md"):
            return match[0] if source.startswith("docs/") else match[1] + _from(source, target[5:]) + match[3]
        return match[1] + _from(source, _uri(target)) + match[3]

    return _outside_code(markdown, lambda text: LINK.sub(moved, text)), outside


def _from(source: str, uri: str) -> str:
    return posixpath.relpath(uri, posixpath.dirname(_uri(source)) or ".")


def _outside_code(markdown: str, change: Callable[[str], str]) -> str:
    parts, end = [], 0
    for code in CODE.finditer(markdown):
        parts += [change(markdown[end : code.start()]), code[0]]
        end = code.end()
    return "".join([*parts, change(markdown[end:])])
