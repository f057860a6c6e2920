"""The shape of the package, read from its source without importing it.

    ranks        a module imports lower ranks or its own package; deferred imports count, and those for types too
    cycles       none at run time, deferred imports included, and none for types but through the root
    step rule    only `StepRule` changes the numbers of a slot's steps
    slots        a slot, its process and its parts assign their own fields; a port of theirs names two implementors
    seams        `torch.distributed.rpc` in transport/rpc.py only; environment variables read in spec/settings.py only;
                 private names of other packages in compat only; threads begin in runtime/threads.py
    pure rules   no threads, clocks, sockets or torch.distributed
    names        a docstring of at most 40 lines, absolute imports, no `utils`

The checks are themselves checked, on sources that break each rule.
"""

import ast
import functools
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Iterator
from pathlib import Path

import pytest
from places import ROOT

PACKAGE = ROOT / "torch_ecrec"

# A unit (module or package directly under torch_ecrec) imports strictly lower ranks or itself. Equal ranks do not know
# each other: records and layout; protocol and storage; transport and durability; server, client and coordinator, which
# meet in `protocol` only (`processes/member.py` carries either of the first two, and is given it).
# "__init__" is `torch_ecrec` itself, the public names (all may read its `__version__`); "examples" is the top-level
# folder, a user's code.
RANKS = {
    "errors": 0,
    "compat": 0,
    "runtime": 1,
    "codec": 2,
    "overhead": 2,
    "records": 3,
    "layout": 3,
    "spec": 4,
    "protocol": 5,
    "storage": 5,
    "transport": 6,
    "durability": 6,
    "observe": 6,
    "server": 7,
    "client": 7,
    "coordinator": 7,
    "web": 7,
    "processes": 8,
    "doctor": 9,
    "resume": 9,
    "state_dicts": 10,
    "nn": 11,
    "model_parallel": 12,
    "checkpoint": 12,
    "planner": 12,
    "testing": 12,
    "__init__": 13,  # after the modules that it names to type checkers
    "demo": 13,
    "rehearsal": 14,
    "bench": 14,
    "examples": 14,
    "experiments": 15,
    "cli": 16,
    "__main__": 17,
}

# Only this module reads the environment.
ENVIRONMENT_READER = "torch_ecrec.spec.settings"
# These start processes: they may hand the environment on, changed or not, without looking into it.
ENVIRONMENT_PASSERS = {"processes", "testing", "demo", "doctor", "bench", "rehearsal"}
# Modules with a reason to do more, each with that reason: module -> kinds of access allowed ("read", "copy", "write").
ENVIRONMENT_EXCEPTIONS: dict[str, set[str]] = {}

RPC_SEAM = "torch_ecrec.transport.rpc"
# Its private names.
RPC_SEAMS = {RPC_SEAM, "torch_ecrec.compat.rpc"}

# Names with an underscore that the standard library documents.
DOCUMENTED = {"_exit", "_getframe", "_current_frames", "_fields"}

PURE = {
    "torch_ecrec.overhead.model",
    "torch_ecrec.layout.stripes",
    "torch_ecrec.records.savers",
    "torch_ecrec.client.client",
    "torch_ecrec.client.reads",
    "torch_ecrec.protocol.membership",
    "torch_ecrec.protocol.waits",
    "torch_ecrec.protocol.pieces",
    "torch_ecrec.layout.repair",
    "torch_ecrec.protocol.step_rule",
    "torch_ecrec.server.inbox",
    "torch_ecrec.protocol.wire",
    "torch_ecrec.protocol.wellformed",
    "torch_ecrec.transport.accrual",
    "torch_ecrec.coordinator.admission",
    "torch_ecrec.coordinator.suspicion",
    "torch_ecrec.coordinator.domains",
    "torch_ecrec.coordinator.coordinator",
    "torch_ecrec.coordinator.departures",
    "torch_ecrec.coordinator.going_back",
    "torch_ecrec.coordinator.job",
    "torch_ecrec.coordinator.members",
    "torch_ecrec.coordinator.placement",
    "torch_ecrec.coordinator.regathering",
    "torch_ecrec.coordinator.router",
    "torch_ecrec.coordinator.settings",
    "torch_ecrec.coordinator.slowness",
    "torch_ecrec.coordinator.state",
    "torch_ecrec.coordinator.status",
    "torch_ecrec.coordinator.succession",
    "torch_ecrec.coordinator.roster",
    "torch_ecrec.storage.policy",
    "torch_ecrec.storage.row_ids",
}
# Whose imports for types alone may close a circle: the root shows type checkers every public name.
CIRCLES_FOR_TYPES = {"torch_ecrec"}
IMPURE = ("asyncio", "concurrent", "multiprocessing", "socket", "subprocess", "threading", "time", "torch.distributed")

# What a slot, its process and its parts are called by who has them.
SLOTS_AND_PARTS = {
    *("slot", "_slot", "host", "_host", "held", "_held", "missing"),
    *("scrubber", "_scrubber", "durability", "snapshots", "_snapshots", "checkpoints", "restoring", "handing"),
    *("inbox", "applier", "reads", "folds", "rebuild", "adoption", "comparisons", "arrival"),
}

VAGUE = {"utils", "util", "common", "helpers", "helper", "misc"}


# --- reading the source ----------------------------------------------------------------------------------------------


def module_name(path: Path) -> str:
    """`.../torch_ecrec/codec/field.py` -> `torch_ecrec.codec.field`; a package's `__init__.py` is the package."""
    parts = list(path.relative_to(PACKAGE.parent).with_suffix("").parts)
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


PATHS = sorted(path for path in PACKAGE.rglob("*.py") if "__pycache__" not in path.parts)
MODULES = {module_name(path): path for path in PATHS}


@functools.cache
def trees() -> dict[str, ast.Module]:
    """Of every module, read when a test first asks: each process that runs tests imports this file."""
    return {name: ast.parse(path.read_text(encoding="utf-8"), str(path)) for name, path in MODULES.items()}


def offenders(errors_of: Callable[[str, ast.Module], Iterable[object]], names: Iterable[str] = MODULES) -> list[str]:
    """What a rule has against each module: one line each, "module: error"."""
    return [f"{name}: {error}" for name in names for error in errors_of(name, trees()[name])]


@functools.cache
def nodes(tree: ast.AST) -> tuple[ast.AST, ...]:
    """All nodes of a tree: many rules look at each."""
    return tuple(ast.walk(tree))


def last_name(node: ast.AST) -> str | None:
    """`c` of `a.b.c`, and of `c`."""
    return node.attr if isinstance(node, ast.Attribute) else node.id if isinstance(node, ast.Name) else None


@functools.cache
def imports(tree: ast.AST, for_types: bool = True) -> tuple[tuple[str, int], ...]:
    """Everything a module may import, at whatever depth: (dotted name, line).

    `from a import b` yields `a.b`: b may be a module. Literal `import_module("a")` and `__import__("a")` count.

    Args:
        tree: the module.
        for_types: include what stands under `if TYPE_CHECKING`.
    """
    return tuple(_imports(tree, for_types))


def _imports(tree: ast.AST, for_types: bool) -> Iterator[tuple[str, int]]:
    if not for_types and isinstance(tree, ast.If) and last_name(tree.test) == "TYPE_CHECKING":
        for statement in tree.orelse:
            yield from _imports(statement, for_types)
        return
    if isinstance(tree, ast.Import):
        yield from ((alias.name, tree.lineno) for alias in tree.names)
    elif isinstance(tree, ast.ImportFrom):
        base = "." * tree.level + (tree.module or "")
        yield from ((f"{base}.{alias.name}", tree.lineno) for alias in tree.names)
    elif isinstance(tree, ast.Call) and last_name(tree.func) in ("import_module", "__import__"):
        for argument in tree.args[:1]:
            if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                yield argument.value, tree.lineno
    for node in ast.iter_child_nodes(tree):
        yield from _imports(node, for_types)


def unit_of(dotted: str) -> str | None:
    """The unit that an imported name belongs to, or None outside the package."""
    head, _, rest = dotted.partition(".")
    if head != "torch_ecrec":
        return None
    first = rest.partition(".")[0]
    return first if first in RANKS or f"torch_ecrec.{first}" in MODULES else "__init__"


def module_of(dotted: str) -> str | None:
    """The longest prefix of an imported name that is a module of the package."""
    while dotted:
        if dotted in MODULES:
            return dotted
        dotted = dotted.rpartition(".")[0]
    return None


def names(tree: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """Attribute chains with the imported name spelled out: after `import torch.distributed as d`, `d.rpc` is
    `torch.distributed.rpc`. Scopes are not told apart."""
    bound: dict[str, str] = {}
    for node in nodes(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                bound[alias.asname or alias.name.partition(".")[0]] = (
                    alias.name if alias.asname else alias.name.partition(".")[0]
                )
        elif isinstance(node, ast.ImportFrom) and node.module:
            for alias in node.names:
                bound[alias.asname or alias.name] = f"{node.module}.{alias.name}"
    for node in nodes(tree):
        parts: list[str] = []
        inner: ast.AST = node
        while isinstance(inner, ast.Attribute):
            parts.append(inner.attr)
            inner = inner.value
        if isinstance(inner, ast.Name) and inner.id in bound:
            yield ".".join([bound[inner.id], *reversed(parts)]), node


def environment_accesses(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """Every touch of the environment: ("read" | "copy" | "write", line).

    copy: the whole of it, unseen, for a child process (`{**os.environ, ...}`, `dict(os.environ, ...)`, `.copy()`, `|`).
    write: an item set or deleted, or `setdefault`, `update`, `pop`, `clear` as a statement. Anything else is a read.
    """
    parents = {child: node for node in nodes(tree) for child in ast.iter_child_nodes(node)}
    for name, node in names(tree):
        line = getattr(node, "lineno", 0)
        if name in ("os.getenv", "os.getenvb"):
            yield "read", line
        elif name in ("os.putenv", "os.unsetenv"):
            yield "write", line
        elif name in ("os.environ", "os.environb"):
            yield _access(node, parents), line


def _access(node: ast.AST, parents: dict[ast.AST, ast.AST]) -> str:
    parent = parents[node]
    above = parents.get(parent)
    if isinstance(parent, ast.Dict) and any(
        key is None and value is node for key, value in zip(parent.keys, parent.values, strict=True)
    ):
        return "copy"
    if isinstance(parent, ast.Call) and node in parent.args and ast.unparse(parent.func) == "dict":
        return "copy"
    if isinstance(parent, ast.keyword) and parent.arg is None and isinstance(above, ast.Call):
        return "copy" if ast.unparse(above.func) == "dict" else "read"
    if isinstance(parent, ast.BinOp) and isinstance(parent.op, ast.BitOr):
        return "copy"
    if isinstance(parent, ast.Attribute) and parent.attr == "copy":
        return "copy"
    if isinstance(parent, ast.Subscript) and isinstance(parent.ctx, ast.Store | ast.Del):
        return "write"
    if (
        isinstance(parent, ast.Attribute)
        and parent.attr in ("setdefault", "update", "pop", "clear")
        and isinstance(above, ast.Call)
        and isinstance(parents.get(above), ast.Expr)
    ):
        return "write"
    return "read"


def uses_of_the_root(tree: ast.AST) -> Iterator[tuple[str, int]]:
    """What a module takes from the root after `import torch_ecrec`: (dotted name, line).

    The root loads nothing by itself, so the import alone means nothing. Passed on whole, it counts as `torch_ecrec.*`.
    """
    parents = {child: node for node in nodes(tree) for child in ast.iter_child_nodes(node)}
    aliases = [alias for node in nodes(tree) if isinstance(node, ast.Import) for alias in node.names]
    roots = {alias.asname or alias.name for alias in aliases if alias.name == "torch_ecrec"}
    for node in nodes(tree):
        if isinstance(node, ast.Name) and node.id in roots:
            parent = parents[node]
            yield f"torch_ecrec.{parent.attr if isinstance(parent, ast.Attribute) else '*'}", node.lineno


def rank_errors(name: str, tree: ast.AST) -> list[str]:
    """Imports that do not go down. The version and the place are everyone's."""
    unit = unit_of(name)
    if unit not in RANKS:
        return ["it has no rank"]
    errors = []
    for target, line in [*imports(tree), *uses_of_the_root(tree)]:
        if target in ("torch_ecrec", "torch_ecrec.__version__", "torch_ecrec.__file__"):
            continue
        other = unit_of(target)
        if other is None or other == unit:
            continue
        if other not in RANKS or RANKS[other] >= RANKS[unit]:
            errors.append(f"line {line} ({unit}, rank {RANKS[unit]}) imports {target} (rank {RANKS.get(other)})")
    return errors


def rpc_lines(tree: ast.AST) -> list[int]:
    """Lines that name torch.distributed.rpc, by import or by attribute."""
    spelled = [(name, getattr(node, "lineno", 0)) for name, node in names(tree)]
    return sorted(
        {line for name, line in [*imports(tree), *spelled] if f"{name}.".startswith("torch.distributed.rpc.")}
    )


def is_private(name: str) -> bool:
    """Whether a name, or a part of a dotted one, begins with one underscore."""
    return any(re.match("_(?!_|$)", part) and part not in DOCUMENTED for part in name.split("."))


class OwnNames:
    """The private names that our sources define: by class, and all of them.

    Args:
        trees: of all modules of ours.
        foreign: what the seam names: whatever else has such a name, nobody outside the seam may ask for it of another
            object than itself.
    """

    def __init__(self, trees: Iterable[ast.AST], foreign: Collection[str] = ()) -> None:
        self.foreign = set(foreign)
        self._of_class: dict[str, set[str]] = {}
        self._bases: dict[str, set[str]] = {}
        self.all: set[str] = set()
        for tree in trees:
            self.all |= self._defined(tree)
            for node in nodes(tree):
                if isinstance(node, ast.ClassDef):  # of two classes of one name, either has what both have
                    self._of_class.setdefault(node.name, set()).update(self._defined(node))
                    bases = {last_name(b.value if isinstance(b, ast.Subscript) else b) for b in node.bases}
                    self._bases.setdefault(node.name, set()).update(filter(None, bases))

    @staticmethod
    def _defined(tree: ast.AST) -> set[str]:
        """What a class or module defines, in it or in what is in it."""
        found = set()
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
                found.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                found.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls", "inner", "made"):
                    found.add(node.attr)
        return {name for name in found if is_private(name)}

    def of_class(self, name: str) -> set[str]:
        """What a class of ours defines, or one of ours that it derives from."""
        found, left, seen = set(), [name], set()
        while left:
            one = left.pop()
            if one not in seen:
                seen.add(one)
                found |= self._of_class.get(one, set())
                left.extend(self._bases.get(one, ()))
        return found


def private_names(tree: ast.AST, own: OwnNames) -> list[str]:
    """Names of other packages that they promise nobody: imported, asked for of an object, or given as text
    (`getattr(module, "_lookups")`).

    Args:
        tree: the module.
        own: what is ours.
    """
    found = [f"line {line}: {name}" for name, line in imports(tree) if not _is_ours(name) and is_private(name)]
    found += [f"line {line}: {name}" for name, line in _attributes(tree, own, "")]
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            dotted = re.fullmatch(r"[a-z]\w*(\.\w+)+", node.value) and not _is_ours(node.value)
            if (node.value in own.foreign or dotted) and is_private(node.value):
                found.append(f"line {node.lineno}: {node.value!r}")
    return found


def _is_ours(dotted: str) -> bool:
    return dotted.split(".")[0] == "torch_ecrec"


def _attributes(tree: ast.AST, own: OwnNames, of: str) -> Iterator[tuple[str, int]]:
    """Private attributes that are not ours, within a class (`of`) or outside of any."""
    if isinstance(tree, ast.ClassDef):
        of = tree.name
    if isinstance(tree, ast.Attribute) and is_private(tree.attr):
        mine = last_name(tree.value) in ("self", "cls") and isinstance(tree.value, ast.Name) and of
        if tree.attr not in own.of_class(of) if mine else tree.attr in own.foreign or tree.attr not in own.all:
            yield ast.unparse(tree), tree.lineno
    for node in ast.iter_child_nodes(tree):
        yield from _attributes(node, own, of)


def named_privately(trees: Iterable[ast.AST]) -> set[str]:
    """Private names that the seam asks for of objects that are not its own, as an attribute or as text."""
    found = set()
    for tree in trees:
        own = OwnNames([tree])
        found |= {name.rpartition(".")[2] for name, _ in _attributes(tree, own, "")}
        for node in nodes(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isidentifier():
                found |= {node.value} if is_private(node.value) else set()
    return found


@functools.cache
def seam() -> dict[str, ast.Module]:
    """The modules that know private names of other packages."""
    return {name: tree for name, tree in trees().items() if unit_of(name) == "compat"}


@functools.cache
def own() -> OwnNames:
    """The private names of this package."""
    ours = [tree for name, tree in trees().items() if name not in seam()]
    return OwnNames(ours, named_privately(seam().values()))


def impure_imports(tree: ast.AST) -> list[str]:
    """Imports of what a pure rule must not know."""
    return [
        f"line {line}: {target}"
        for target, line in imports(tree)
        if any(f"{target}.".startswith(f"{module}.") for module in IMPURE)
    ]


def cycle(graph: dict[str, set[str]]) -> list[str] | None:
    """One cycle of a graph, closed (first == last), or None."""
    done: set[str] = set()

    def visit(node: str, trail: list[str]) -> list[str] | None:
        if node in trail:
            return [*trail[trail.index(node) :], node]
        if node in done:
            return None
        for following in sorted(graph.get(node, ())):
            if found := visit(following, [*trail, node]):
                return found
        done.add(node)
        return None

    for node in sorted(graph):
        if found := visit(node, []):
            return found
    return None


# --- the rules -------------------------------------------------------------------------------------------------------


def test_every_unit_has_a_rank() -> None:
    assert MODULES, f"nothing under {PACKAGE}"
    unranked = {unit_of(name) for name in MODULES} - set(RANKS)
    assert not unranked, f"give it a rank in RANKS: {sorted(map(str, unranked))}"


def test_the_tables_name_what_exists() -> None:
    """A rule for a module that was renamed would hold for nobody."""
    units = {unit_of(name) for name in MODULES} | {"__init__", "examples"}
    assert set(RANKS) == units
    assert units >= ENVIRONMENT_PASSERS
    assert {ENVIRONMENT_READER, *RPC_SEAMS} | set(ENVIRONMENT_EXCEPTIONS) <= set(MODULES)
    assert rpc_lines(trees()[RPC_SEAM]), "the seam itself"


def test_server_client_and_coordinator_are_strangers() -> None:
    """Their equal rank is what keeps them apart; this fails if someone 'repairs' the table."""
    assert RANKS["server"] == RANKS["client"] == RANKS["coordinator"]
    assert RANKS["records"] == RANKS["layout"]
    assert RANKS["protocol"] == RANKS["storage"], "what is kept in a store is read without any message"
    assert RANKS["durability"] == RANKS["transport"], "what makes steps survive does not know how messages travel"


def test_imports_go_down() -> None:
    assert not offenders(rank_errors)


@pytest.mark.parametrize("for_types", [False, True], ids=["at run time", "for types"])
def test_no_import_cycle(for_types: bool) -> None:
    graph: dict[str, set[str]] = {}
    for name, tree in trees().items():
        targets = {module_of(target) for target, _ in imports(tree, for_types and name not in CIRCLES_FOR_TYPES)}
        graph[name] = {target for target in targets if target is not None and target != name}
    found = cycle(graph)
    assert found is None, " -> ".join(found or [])


def writes_to(tree: ast.AST, names: Collection[str]) -> list[str]:
    """Assignments to fields of what has one of these names, made through whoever has it: `x.rule.applied = 3`."""
    found = []
    for node in nodes(tree):
        targets = node.targets if isinstance(node, ast.Assign | ast.Delete) else [getattr(node, "target", None)]
        for target in targets if isinstance(node, ast.Assign | ast.AugAssign | ast.AnnAssign | ast.Delete) else []:
            for inner in ast.walk(target) if target is not None else ():
                if isinstance(inner, ast.Attribute) and last_name(inner.value) in names:
                    found.append(f"line {inner.lineno}: {ast.unparse(inner)}")
    return found


def test_only_the_step_rule_changes_steps() -> None:
    assert not offenders(lambda _, tree: writes_to(tree, {"rule"}))


def test_a_slot_and_its_parts_assign_their_own_fields() -> None:
    """Whoever else has news of them calls a method: each field has one owner."""
    parts = [part for part in ("server", "durability") if (ROOT / "torch_ecrec" / part).is_dir()]
    assert len(parts) == 2, "name here what they have become"
    mine = [name for name in MODULES if unit_of(name) in parts]
    assert not offenders(lambda _, tree: writes_to(tree, SLOTS_AND_PARTS), mine)


def protocols_of(tree: ast.AST) -> list[ast.ClassDef]:
    """The ports of a module: classes that are a `Protocol`."""
    classes = [node for node in nodes(tree) if isinstance(node, ast.ClassDef)]
    return [one for one in classes if any(ast.unparse(base) in ("Protocol", "typing.Protocol") for base in one.bases)]


def test_a_port_of_a_slot_names_who_implements_it() -> None:
    """A port is for two implementors; a part of one class is given that class."""
    places = re.compile(r"`\w+(?:/\w+)*\.py(?::\w+)?`")

    def errors_of(_: str, tree: ast.Module) -> Iterator[str]:
        for one in protocols_of(tree):
            named = set(places.findall(ast.get_docstring(one) or ""))
            if len(named) < 2:
                yield f"line {one.lineno}: {one.name} names {len(named)} implementors"

    assert not offenders(errors_of, [name for name in MODULES if unit_of(name) in ("server", "durability")])


@pytest.mark.parametrize(
    "source",
    [
        "self.rule.applied = 3",
        "slot.rule.applied = slot.rule.acknowledged = 3",
        "rule.folded[source] -= 1",
        "del held.rule.confirmed[2]",
        "a, rule.applied = 1, 2",
    ],
)
def test_a_write_to_the_step_rule_is_found(source: str) -> None:
    assert writes_to(ast.parse(source), {"rule"})
    assert not writes_to(ast.parse("self.rule = StepRule()\nx = self.rule.applied\nrule = slot.rule"), {"rule"})


@pytest.mark.parametrize("source", ["self._slot.ready = True", "self.slot.at, b = 1, 2", "host.frozen |= True"])
def test_a_write_to_a_slot_is_found(source: str) -> None:
    assert writes_to(ast.parse(source), SLOTS_AND_PARTS)
    assert not writes_to(ast.parse("self.slot = slot\nself.ready = slot.ready\nself.slots[1] = slot"), SLOTS_AND_PARTS)


def test_no_two_test_files_have_one_name() -> None:
    """Pytest imports them by it."""
    names = Counter(path.name for path in (ROOT / "tests").rglob("test_*.py"))
    assert not [name for name, count in names.items() if count > 1]


def test_imports_are_absolute() -> None:
    assert not offenders(
        lambda _, tree: (f"line {line}: {target}" for target, line in imports(tree) if target.startswith("."))
    )


def test_only_the_seam_knows_rpc() -> None:
    assert not offenders(lambda name, tree: rpc_lines(tree) if name not in RPC_SEAMS else ())


def test_only_the_seam_knows_private_names_of_other_packages() -> None:
    def errors_of(name: str, tree: ast.Module) -> list[str]:
        return [] if name in seam() else private_names(tree, own())

    assert not offenders(errors_of)
    assert {"_modules", "_version", "_lookups", "_locator_classes", "_optimizer_classes"} <= own().foreign


def plain_threads(tree: ast.AST) -> list[str]:
    """Threads whose end by an exception nobody hears of."""
    calls = [node for node in nodes(tree) if isinstance(node, ast.Call)]
    return [f"line {call.lineno}: {ast.unparse(call)[:60]}" for call in calls if last_name(call.func) == "Thread"]


def test_where_a_thread_fails_somebody_hears_of_it() -> None:
    assert not offenders(lambda _, tree: plain_threads(tree))
    assert plain_threads(ast.parse("threading.Thread(target=work).start()"))


def test_only_settings_read_the_environment() -> None:
    def errors_of(name: str, tree: ast.Module) -> list[str]:
        allowed = {"copy", "write"} if unit_of(name) in ENVIRONMENT_PASSERS else set()
        allowed |= ENVIRONMENT_EXCEPTIONS.get(name, set())
        allowed |= {"read", "copy", "write"} if name == ENVIRONMENT_READER else set()
        return [f"line {line}: {kind}" for kind, line in environment_accesses(tree) if kind not in allowed]

    assert not offenders(errors_of)


def test_rules_are_pure() -> None:
    gone = PURE - set(trees())
    assert not gone, f"no modules any more: name in PURE what they have become: {sorted(gone)}"
    assert not offenders(lambda _, tree: impure_imports(tree), sorted(PURE))


def test_modules_are_documented() -> None:
    def errors_of(_: str, tree: ast.Module) -> list[str]:
        docstring = ast.get_docstring(tree)
        if not docstring:
            return ["no docstring"]
        return ["the docstring is longer than 40 lines"] if len(docstring.splitlines()) > 40 else []

    assert not offenders(errors_of)


def test_no_vague_name() -> None:
    assert not offenders(lambda name, _: VAGUE & {part.strip("_") for part in name.split(".")})


def test_the_simulated_cluster_is_for_tests_alone() -> None:
    """It is not installed, so that nothing of the package may need it."""

    def errors_of(_: str, tree: ast.Module) -> list[str]:
        return [f"line {line}: {name}" for name, line in imports(tree) if name.partition(".")[0] == "harness"]

    assert not offenders(errors_of)
    of_harness = sorted((ROOT / "tests" / "harness").glob("*.py"))
    assert of_harness
    for path in of_harness:
        tree = ast.parse(path.read_text(encoding="utf-8"))
        docstring = ast.get_docstring(tree)
        assert docstring and len(docstring.splitlines()) <= 40, path
        assert not [name for name, _ in imports(tree) if name.startswith(".")], path


# --- the rules find what breaks them ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "source"),
    [
        ("torch_ecrec.server.slot", "import torch_ecrec.client"),
        ("torch_ecrec.server.slot", "from torch_ecrec import client"),
        ("torch_ecrec.server.slot", "from torch_ecrec import DistributedModelParallel"),
        ("torch_ecrec.client", "def f():\n    from torch_ecrec.coordinator import decide"),
        ("torch_ecrec.codec.field", "if TYPE_CHECKING:\n    from torch_ecrec.layout import Layout"),
        ("torch_ecrec.layout.stripes", "import importlib\nimportlib.import_module('torch_ecrec.records.shard')"),
        ("torch_ecrec.processes.launch", "def f():\n    import torch_ecrec.nn.parallel as p"),
        ("torch_ecrec.errors", "import torch_ecrec\nf = torch_ecrec.DistributedModelParallel"),
        ("torch_ecrec.errors", "import torch_ecrec as t\ngetattr(t, 'nn')"),
    ],
)
def test_a_wrong_import_is_found(name: str, source: str) -> None:
    assert len(rank_errors(name, ast.parse(source))) == 1


def test_a_right_import_is_not() -> None:
    source = "import numpy\nfrom torch_ecrec.protocol.step_rule import StepRule\nfrom torch_ecrec import layout, errors"
    assert rank_errors("torch_ecrec.server.slot", ast.parse(source)) == []
    source = "import torch_ecrec\nx = torch_ecrec.__version__\nfrom torch_ecrec import __version__"
    assert rank_errors("torch_ecrec.errors", ast.parse(source)) == []


def test_a_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"b"}}) == ["b", "c", "b"]
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) is None
    source = "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import a\nelse:\n    import b"
    assert [name for name, _ in imports(ast.parse(source), for_types=False)] == ["typing.TYPE_CHECKING", "b"]


@pytest.mark.parametrize(
    "source",
    [
        "import torch.distributed.rpc",
        "import torch.distributed.rpc as r",
        "from torch.distributed import rpc",
        "from torch.distributed.rpc import rpc_async",
        "import torch\ntorch.distributed.rpc.shutdown()",
        "import torch.distributed as dist\ndef f():\n    dist.rpc.shutdown()",
        "from torch import distributed as dist\ndist.rpc.shutdown()",
    ],
)
def test_rpc_is_found(source: str) -> None:
    assert rpc_lines(ast.parse(source))


@pytest.mark.parametrize(
    "source",
    [
        "import torch._C",
        "from torch._C import x",
        "from torch.nn.modules.module import _IncompatibleKeys",
        "import torch\ntorch._C.f()",
        "from torch import nn\nnn.Module._load(1)",
        "import torchrec.distributed as d\nd._x",
        "def f(module):\n    return module._modules",
        "def f(module):\n    return getattr(module, '_lookups', ())",
        "class A(nn.Module):\n    def f(self):\n        return self._modules",
        "class A(nn.Module):\n    def f(self, x):\n        return super()._apply(x)",
        "import sys\nsys.modules['torch._dynamo.convert_frame']",
        "class A:\n    def f(self):\n        self._modules = 1\ndef f(a):\n    return a._modules",
    ],
)
def test_a_private_name_is_found(source: str) -> None:
    tree = ast.parse(source)
    assert private_names(tree, OwnNames([tree], own().foreign))


@pytest.mark.parametrize(
    "source",
    [
        "import torch\nclass A:\n    def f(self):\n        self._x = torch.__version__",
        "class A:\n    _x = 1\nclass B(A[int]):\n    def f(self):\n        return self._x",
        "class A:\n    def f(self):\n        self._x = 1\n    def g(self, other):\n        return other._x",
        "from torch_ecrec.nn import _x\nimport os\nos._exit(1)\nname = '_'\nd = '__dict__'",
    ],
)
def test_names_of_ours_are_not_private(source: str) -> None:
    tree = ast.parse(source)
    assert not private_names(tree, OwnNames([tree], own().foreign))


def test_other_uses_of_torch_distributed_are_not_rpc() -> None:
    assert not rpc_lines(
        ast.parse("import torch.distributed as dist\ndist.barrier()\nfrom torch.distributed import TCPStore")
    )


@pytest.mark.parametrize(
    ("kind", "source"),
    [
        ("read", "import os\nos.getenv('RANK')"),
        ("read", "from os import getenv\ngetenv('RANK')"),
        ("read", "import os\nos.environ['RANK']"),
        ("read", "import os\nos.environ.get('RANK')"),
        ("read", "import os as o\n'RANK' in o.environ"),
        ("read", "from os import environ as e\nx = e.pop('RANK')"),
        ("read", "import os\nf(**os.environ)"),
        ("read", "import os\nx = os.environ"),
        ("copy", "import os\nx = {**os.environ, 'A': 'b'}"),
        ("copy", "import os\nx = dict(os.environ, A='b')"),
        ("copy", "import os\nx = dict(A='b', **os.environ)"),
        ("copy", "import os\nx = os.environ.copy()"),
        ("copy", "import os\nx = os.environ | {'A': 'b'}"),
        ("write", "import os\nos.environ['A'] = 'b'"),
        ("write", "import os\nos.environ.setdefault('A', 'b')"),
        ("write", "import os\ndel os.environ['A']"),
    ],
)
def test_an_access_to_the_environment_is_told(kind: str, source: str) -> None:
    assert {found for found, _ in environment_accesses(ast.parse(source))} == {kind}


@pytest.mark.parametrize("source", ["import time", "from threading import Lock", "from torch import distributed"])
def test_impurity_is_found(source: str) -> None:
    assert impure_imports(ast.parse(source))
    assert not impure_imports(ast.parse("import numpy, torch\nimport timeit"))


def test_tests_lie_in_tiers() -> None:
    """Those that start processes lie where those do; nothing lies beside the tiers."""
    tests = ROOT / "tests"
    beside = sorted(path.name for path in tests.iterdir() if path.is_file())
    assert beside == ["conftest.py"], "a test lies in the folder of its tier, see CONTRIBUTING.md"
    assert {path.parent.name for path in tests.rglob("test_*.py")} == {"unit", "simulated", "processes"}
    starts = re.compile(r"\b(Supervisor|Popen|spawn)\(")
    wrong = [
        str(path.relative_to(tests))
        for tier in ("unit", "simulated")
        for path in (tests / tier).rglob("*.py")
        if starts.search(path.read_text(encoding="utf-8"))
    ]
    assert not wrong, f"they start processes, and belong into tests/processes: {wrong}"
