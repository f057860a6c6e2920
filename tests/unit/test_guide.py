"""The documents as a site: whose pages are whose, how much users have to read, and that commands in them are taken."""

from __future__ import annotations

import argparse
import ast
import importlib
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
from blocks import commands, fenced
from pages import DOCS, navigation
from places import ROOT

import torch_ecrec
from torch_ecrec import errors
from torch_ecrec.cli.bench import named_in
from torch_ecrec.cli.main import Parser, parser

OF_CONTRIBUTORS, MADE = "For contributors", "Evidence"  # the latter is made by commands, or says how it is made
GENERATED = {DOCS / "reference.md"}  # of the user's sections: made by a command, `python -m torch_ecrec.cli.reference`
THE_WAY = ("quickstart.md", "migrate.md", "hosts.md")  # from nothing to three protected hosts
USERS = sorted(
    {page for title, pages in navigation().items() if title not in (OF_CONTRIBUTORS, MADE) for page in pages}
    - GENERATED
)
KNOWN_PATHS = ("design.md", "architecture.md", "protocol.md", "assumptions.md")  # contributors name them so
SITE = ("mkdocs", "material", "mkdocstrings_handlers.python")


LOOKED_UP = DOCS / "troubleshooting.md"  # the first column of its tables, messages, is searched and not read


def words(page: Path) -> int:
    lines = page.read_text(encoding="utf-8").splitlines()
    if page == LOOKED_UP:
        lines = [line.split("|", 2)[2] if line.startswith("| `") else line for line in lines]
    return sum(len(line.split()) for line in lines)


def test_every_page_is_in_one_section() -> None:
    listed = [page for pages in navigation().values() for page in pages]
    assert len(set(listed)) == len(listed)
    assert set(DOCS.rglob("*.md")) == {*listed, DOCS / "performance-notes.md"}, "its text is the end of performance.md"


def test_pages_of_contributors_are_apart() -> None:
    of_contributors = navigation()[OF_CONTRIBUTORS]
    assert {DOCS / name for name in KNOWN_PATHS} <= set(of_contributors)
    apart = {page for page in of_contributors if page.name not in KNOWN_PATHS}
    assert apart == set((DOCS / "contributing").glob("*.md"))


def test_users_can_read_all_of_theirs() -> None:
    assert sum(map(words, USERS)) <= 17_500, {page.name: words(page) for page in USERS}
    assert sum(words(DOCS / name) for name in THE_WAY) <= 4_000


def said_inline(page: Path) -> list[str]:
    """Commands within a sentence or a cell: `torch-ecrec status --watch`."""
    text = re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(code.split()) for code in re.findall(r"`(torch-ecrec [^`]+)`", text)]


class _Refused(Exception):
    pass


def refused(line: str) -> str | None:
    """Why `torch-ecrec` would not take a command line. `...` stands for more arguments, and `PATH` for a value."""
    command = re.sub(r"\s[|&]\s.*|\s&$|\s>.*", "", re.sub(r"^(\w+=\S+ )+", "", line))
    typed = shlex.split(re.sub(r"(--\w+) \.\.\.", r"\1 MORE", command), comments=True)[1:]
    named, whole = [word for word in typed if word != "..."], "..." not in typed and len(typed) > 1
    try:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Parser, "error", _refuse)
            parser(named_in(named)).parse_args(named)
    except _Refused as error:
        stands_for_a_value = re.search(r"invalid .*'[A-Z]+'", str(error))
        lacks = re.search(r"are required: ", str(error)) and not whole
        return None if stands_for_a_value or lacks else f"{line}: {error}"
    return None


def _refuse(self: argparse.ArgumentParser, message: str) -> None:
    raise _Refused(message)


@pytest.mark.parametrize("page", [*USERS, ROOT / "README.md"], ids=lambda page: str(page.relative_to(ROOT)))
def test_commands_are_taken(page: Path) -> None:
    lines = [line for line in commands(page) if "torch-ecrec " in line] + said_inline(page)
    assert not [why for line in lines if (why := refused(line)) is not None]


def test_a_command_that_is_not_there_is_found() -> None:
    for line in ("torch-ecrec up --sirvers 3", "torch-ecrec upp", "torch-ecrec bench train --shapp paper"):
        assert refused(line) is not None
    for line in ("X=1 torch-ecrec up --servers 3 ...  # so many", "torch-ecrec serve --join ... &", "torch-ecrec plan"):
        assert refused(line) is None


@pytest.mark.parametrize("page", USERS, ids=lambda page: str(page.relative_to(DOCS)))
def test_python_is_python_and_its_imports_are_there(page: Path) -> None:
    for code in fenced(page, "python"):
        for node in ast.walk(ast.parse(code)):
            if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch_ecrec":
                module = importlib.import_module(node.module or "")
                missing = [one.name for one in node.names if not hasattr(module, one.name)]
                assert not [name for name in missing if importlib.util.find_spec(f"{node.module}.{name}") is None]


def test_the_reference_has_the_public_names() -> None:
    page = (DOCS / "api.md").read_text(encoding="utf-8")
    named = set(re.findall(r"^::: torch_ecrec\.(\S+)$", page, re.MULTILINE))
    of_errors = {name for name in torch_ecrec.__all__ if hasattr(errors, name)}
    assert set(torch_ecrec.__all__) - of_errors - {"__version__"} <= named and "errors" in named


def built(root: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """Builds the site of a folder with mkdocs.yml, where no network can be reached; warnings are errors."""
    for module in SITE:
        pytest.importorskip(module, reason=f"the site needs {module}: pip install -r requirements/site.txt")
    nowhere = dict.fromkeys(("http_proxy", "https_proxy", "HTTP_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:9")
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", str(site)]
    env = {**os.environ, **nowhere, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(command, cwd=root, env=env, capture_output=True, text=True, timeout=600)


def test_the_site_is_built_without_a_warning_or_a_network(tmp_path: Path) -> None:
    ended = built(ROOT, tmp_path)
    assert ended.returncode == 0, ended.stderr[-4000:]
    api = (tmp_path / "api.html").read_text(encoding="utf-8")
    assert all(f'id="torch_ecrec.{name}"' in api for name in ("DistributedModelParallel", "CodeSpec", "Settings"))
    assert (tmp_path / "repository" / "examples" / "two_tower.py.html").exists()


def test_a_broken_link_or_an_unlisted_page_is_no_site(tmp_path: Path) -> None:
    outside = ("mkdocs.yml", "torch_ecrec", "examples", "deploy", "CONTRIBUTING.md", "CHANGELOG.md")
    (tmp_path / "docs").mkdir()
    for entry in [*(ROOT / name for name in outside), *DOCS.iterdir()]:
        (tmp_path / entry.relative_to(ROOT)).symlink_to(entry)
    for name, more in (("site.py", ""), ("limits.md", "\n[a](none.md) [b](hosts.md#none)\n")):
        copy = tmp_path / "docs" / name
        copy.unlink()
        copy.write_text((DOCS / name).read_text(encoding="utf-8") + more, encoding="utf-8")
    (tmp_path / "docs" / "unlisted.md").write_text("# Unlisted\n", encoding="utf-8")
    ended = built(tmp_path, tmp_path / "site")
    assert ended.returncode == 1
    assert all(name in ended.stderr for name in ("'none.md'", "'#none'", "unlisted.md")), ended.stderr
    assert "Aborted with 3 warnings" in ended.stdout + ended.stderr
