"""docs/troubleshooting.md has what users can be told: every message of the parts that they meet, every error.

A message is looked up as a user does: the words of an entry, in order, between the signs that stand for names and
numbers. The other way round, an entry whose words nobody says any more is found, too.
"""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from places import ROOT

from torch_ecrec import errors

PAGE = (ROOT / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
PACKAGE = ROOT / "torch_ecrec"
MET_BY_USERS = (
    *("nn", "resume", "state_dicts", "checkpoint", "planner", "spec", "cli", "storage", "rehearsal", "web", "overhead"),
    *("doctor", "model_parallel.py", "__init__.py", "runtime/checks.py", "runtime/addresses.py"),
    *("runtime/installed.py", "runtime/kernel_cache.py", "client/waiting.py", "client/session.py"),
    *("client/loading.py", "processes/launch.py", "processes/member.py", "processes/nodes.py"),
    *("processes/restore_source.py", "processes/supervisor.py", "processes/leadership.py", "processes/coordination.py"),
    *("coordinator/checkpoint_settings.py", "coordinator/settings.py", "coordinator/job.py"),
    *("coordinator/launches.py", "coordinator/election.py", "transport/control.py"),
    *(
        "transport/whereabouts.py",
        "transport/etcd.py",
        "transport/secret.py",
        "records/pages.py",
        "records/tiers/budget.py",
        "records/tiers/disk.py",
    ),
)
SAYS = re.compile(r"(?<!log\.)\b_?(require|refus\w*|fault|error|other|missing)$", re.IGNORECASE)
ANY, LEAST_WORDS = "\N{HORIZONTAL ELLIPSIS}", 3

# Told to programs, or a slip of this package's own: what ends in such a message is reported, not mended by its reader.
OF_PROGRAMS = (
    "parts of exactly one step …|step …: need parts …|step …: the index …|no part of a snapshot …|step …, part …"
    "|step …: not what a trainer keeps …|a header must have …|step …: part … does not fit the others"
    "|not an encoded value|an array of shape …|a scalar of …|a tensor of shape …, …, of … bytes|a tensor with flags …"
    "|a tensor's dimensions …|tensors of more than …|a tensor at bytes …|summed are contiguous …"
    "|a file of records must begin …|a line of more than …|serve_forever was called twice|not a JSON object …"
    "|the other side … said before|zstd gives …|… bytes for … rows …"
    "|there is no table group …|table group … has rows …"
    "|rows_N must be …|rows must be 0 to …|a row is negative|runs are of …|row numbers have …|wanted must have …"
    "|… row … of table group … is of slot …|… has parts of the dense model beyond …"
    "|this describes no part …|job is none …"
    "|encoding of checkpoints …|a defaultdict of …|rows must be ascending …|a tensor as key"
    "|a NumPy array of dtype …|…: the dense model is of another step …|it says what was not agreed"
)


def template(node: ast.expr | None) -> str | None:
    """The text that an expression gives, with `{}` for what is put in; None: it is no text that stands in the code."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return node.value
    if isinstance(node, ast.JoinedStr):
        return "".join(str(v.value) if isinstance(v, ast.Constant) else "{}" for v in node.values)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = template(node.left), template(node.right)
        return None if left is None and right is None else (left or "{}") + (right or "{}")
    return None


def texts(tree: ast.AST) -> Iterator[str]:
    """Every text within, the pieces of a longer one left out, and docstrings."""
    inner = {id(v) for n in ast.walk(tree) if isinstance(n, ast.JoinedStr) for v in n.values}
    inner |= {id(n.value) for n in ast.walk(tree) if isinstance(n, ast.Expr)}
    for node in ast.walk(tree):
        if id(node) not in inner and isinstance(node, ast.expr) and (text := template(node)) is not None:
            yield plain(text)


def said(path: Path) -> Iterator[str]:
    """The messages that a module raises: of its `raise` statements, and of calls that raise (`require`, `fault`)."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    constants = {
        target.id: text
        for node in tree.body
        if isinstance(node, ast.Assign) and (text := template(node.value)) is not None
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        arguments: list[ast.expr] = []
        if isinstance(node, ast.Raise) and isinstance(node.exc, ast.Call):
            arguments = node.exc.args[:1]
        elif isinstance(node, ast.Call) and SAYS.search(ast.unparse(node.func)):
            arguments = node.args
        for one in arguments:
            text = constants.get(one.id) if isinstance(one, ast.Name) else template(one)
            if text is not None and min(len(plain(text).split()), len(words(text))) >= LEAST_WORDS:
                yield plain(text)


def plain(text: str) -> str:
    """Without the marks of code, and with single spaces."""
    return " ".join(text.replace("`", "").split())


def words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z]{2,}", text)


@functools.cache
def pieces(pattern: str) -> list[str]:
    """What an entry says between the signs that stand for anything."""
    return [piece for piece in (plain(one) for one in pattern.split(ANY)) if words(piece) or piece in (";", ": ;")]


def fits(message: str, pattern: str) -> bool:
    """Whether the pieces of an entry are in the message, in order; the first at its begin, unless `…` is before it."""
    at = 0
    for number, piece in enumerate(pieces(pattern)):
        found = message.find(piece, at)
        if found < 0 or (number == 0 and found > 0 and not pattern.startswith(ANY)):
            return False
        at = found + len(piece)
    return True


@functools.cache
def entries() -> tuple[str, ...]:
    """What the first column of the page's tables quotes."""
    rows = re.findall(r"^\| (`.*?) \| ", PAGE, re.MULTILINE)
    return tuple(quoted for row in rows for quoted in re.findall(r"`([^`]+)`", row))


def modules() -> list[Path]:
    return sorted(
        path
        for name in MET_BY_USERS
        for path in ([PACKAGE / name] if name.endswith(".py") else (PACKAGE / name).glob("*.py"))
    )


@pytest.mark.smoke  # looks at all of the package
@pytest.mark.parametrize("path", modules(), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_every_message_is_on_the_page(path: Path) -> None:
    known = [*entries(), *OF_PROGRAMS.split("|")]
    assert not [message for message in said(path) if not any(fits(message, pattern) for pattern in known)]


@pytest.mark.smoke  # looks at all of the package
def test_every_error_is_on_the_page_with_its_exit_code() -> None:
    for name, kind in vars(errors).items():
        if isinstance(kind, type) and issubclass(kind, Exception) and kind.__module__ == errors.__name__:
            code = getattr(kind, "exit_code", "")
            assert f"| `{name}` | {code} |".replace("|  |", "| |") in PAGE


@pytest.mark.smoke  # looks at all of the package
def test_every_entry_is_said_somewhere() -> None:
    everything = [text for path in PACKAGE.rglob("*.py") for text in texts(ast.parse(path.read_text("utf-8")))]
    of_errors = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    unsaid = [one for one in entries() if one not in of_errors and not any(fits(text, one) for text in everything)]
    assert not unsaid


def test_a_message_is_found_by_its_words() -> None:
    assert fits("id {} of feature {} is out of range: table {}", f"id {ANY} of feature {ANY} is out of range {ANY}")
    assert not fits("an id {} of feature {} is out of range", f"id {ANY} of feature {ANY}")
    assert not fits("feature {} of id {}", f"{ANY}id {ANY} of feature {ANY}")
    tree = ast.parse("def f():\n    '''Not this.'''\n    raise ValueError(f'no {x} here' + 'now')\n")
    assert next(texts(tree)) == "no {} herenow"
