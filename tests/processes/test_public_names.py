"""The names of the package's root: what users import, at run time and as type checkers see them."""

import inspect
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

import torch_ecrec

NAMES = sorted(set(torch_ecrec.__all__) - {"__version__"})

# Without the libraries' own types a check takes seconds, not a minute. What is ours is looked at as it is.
CONFIG = """
[mypy]
python_version = 3.11
ignore_missing_imports = true
[mypy-torch.*]
follow_imports = skip
[mypy-torchrec.*]
follow_imports = skip
[mypy-numpy.*]
follow_imports = skip
"""


@pytest.mark.parametrize("name", NAMES)
def test_a_name_is_the_class_of_its_place(name: str) -> None:
    cls = getattr(torch_ecrec, name)
    assert isinstance(cls, type) and cls.__name__ == name and cls.__module__ == torch_ecrec._PLACES[name]


def test_every_public_name_has_a_place() -> None:
    assert set(NAMES) == set(torch_ecrec._PLACES)
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        torch_ecrec.Nonsense  # noqa: B018


def test_completion_at_a_prompt_offers_every_public_name() -> None:
    """In a process that has asked for none yet, as `dir` looks at modules."""
    command = [sys.executable, "-c", "import torch_ecrec; print(*dir(torch_ecrec))"]
    run = subprocess.run(command, check=True, capture_output=True, text=True, timeout=600, cwd=ROOT)
    assert {*NAMES, *torch_ecrec._MODULES, "__version__"} <= set(run.stdout.split())


def test_the_root_alone_loads_nothing() -> None:
    code = "import sys, torch_ecrec; dir(torch_ecrec); assert not [m for m in sys.modules if m.startswith('torch')][1:]"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600, cwd=ROOT)


def test_type_checkers_see_the_classes(tmp_path: Path) -> None:
    """Each name is its class, not Any, and a name that is not there is an error."""
    (tmp_path / "mypy.ini").write_text(CONFIG)
    lines = ["import torch_ecrec", *(f"reveal_type(torch_ecrec.{name})" for name in NAMES), "torch_ecrec.Nonsense"]
    lines[1:1] = ["torch_ecrec.checkpoint.save, torch_ecrec.planner.Servers, torch_ecrec.errors.DataLoss"]  # no error
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "mypy", "--config-file", str(tmp_path / "mypy.ini")]
    command += ["--cache-dir", str(tmp_path / "cache"), str(tmp_path / "user.py")]
    run = subprocess.run(command, capture_output=True, text=True, timeout=600, cwd=ROOT)
    told = [line.partition("user.py:")[2] for line in run.stdout.splitlines() if "user.py:" in line]
    assert len(told) == len(NAMES) + 1, run.stdout + run.stderr
    for number, (name, line) in enumerate(zip(NAMES, told, strict=False), start=3):
        cls = getattr(torch_ecrec, name)
        assert line.startswith(f'{number}: note: Revealed type is "def ('), line
        assert line.endswith(f') -> {cls.__module__}.{name}"'), line
    assert told[-1].startswith(f'{len(lines)}: error: Module has no attribute "Nonsense"'), told[-1]


def test_constructor_parameters_are_torchrecs_and_then_ours_by_name_only() -> None:
    import torchrec.distributed.model_parallel as theirs

    wanted = inspect.signature(theirs.DistributedModelParallel).parameters
    found = inspect.signature(torch_ecrec.DistributedModelParallel).parameters
    first = list(found.values())[: len(wanted)]
    assert [(p.name, p.kind, p.default) for p in first] == [(p.name, p.kind, p.default) for p in wanted.values()]
    assert all(p.kind is p.KEYWORD_ONLY for p in list(found.values())[len(wanted) :])


def test_one_import_line_is_the_change_from_torchrec() -> None:
    import torchrec.distributed.model_parallel as theirs
    from torchrec.distributed.sharding_plan import get_default_sharders

    from torch_ecrec import model_parallel

    assert model_parallel.DistributedModelParallel is torch_ecrec.DistributedModelParallel
    assert model_parallel.get_default_sharders is get_default_sharders
    for name in set(model_parallel.__all__) - {"DistributedModelParallel", "get_default_sharders"}:
        assert getattr(model_parallel, name) is getattr(theirs, name)
    from torch_ecrec.model_parallel import EmbeddingShardingPlanner, ShardingEnv, sharded_model_copy  # as a script may

    assert (ShardingEnv, sharded_model_copy) == (theirs.ShardingEnv, theirs.sharded_model_copy)
    assert EmbeddingShardingPlanner is theirs.EmbeddingShardingPlanner
    for name in ("DMPCollection", "DMPCollectionConfig"):
        with pytest.raises(ImportError, match=f"{name} is not served: its replicas"):
            getattr(model_parallel, name)
    with pytest.raises(ImportError, match="DMPCollection is not served"):
        from torch_ecrec.model_parallel import DMPCollection  # noqa: F401
    with pytest.raises(ImportError, match="HybridEvalDMP is TorchRec's own sharding"):
        from torch_ecrec.model_parallel import HybridEvalDMP  # noqa: F401
    with pytest.raises(AttributeError, match="no attribute 'Nonsense'"):
        model_parallel.Nonsense  # noqa: B018
