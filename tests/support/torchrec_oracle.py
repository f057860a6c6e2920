"""TorchRec's own tests with our class in place of theirs: what a script is after one changed import line.

    swap()              their test modules, in this process, make our `DistributedModelParallel` from now on
    restore()           ends that
    PROCESSES           two processes that do the same

The bases are those of the installed TorchRec; nothing of them is here. `TORCH_ECREC_ORACLE` says with what they run:

    memory     (default) ours, with tables in memory: `fake_session.py`, which the real one's tests hold to the same
    cluster    ours, each model with a cluster of its own, which its trainer 0 starts
    up         ours, each model with a cluster of its own, started by `torch-ecrec up`, which trainers join by address
    stock      theirs, to see what passes without us

`TORCH_ECREC_ORACLE_EXAMPLES` says how many of the arguments that a test draws are tried, where it is fewer than the
test's own number: over clusters each example starts one for each model.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import pickle
import select
import subprocess
import sys
import time
import traceback
import types
import unittest
from collections.abc import Callable
from typing import Any

import forked
import hypothesis
import torch.distributed as dist
from fake_session import FakeSession
from torchrec.distributed.embedding import EmbeddingCollectionSharder
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.test_utils import get_free_port

import torch_ecrec
from torch_ecrec.nn import parallel
from torch_ecrec.nn.backend import EmbeddingBackend
from torch_ecrec.processes.children import Child
from torch_ecrec.spec.job import JobSpec
from torch_ecrec.spec.settings import Settings

MODES = ("memory", "cluster", "up", "stock")
_MODULES = (
    "torchrec.distributed.test_utils.test_model_parallel_base",
    "torchrec.distributed.test_utils.test_sharding",
)
_ENVIRONMENT = ("MASTER_ADDR", "GLOO_DEVICE_TRANSPORT", "TORCH_ECREC_ORACLE")
TIMEOUT_S = 600.0  # only a hang reaches it
MODELS_AT_ONCE = 2
LEASE_S = 240.0  # nobody is taken for lost who is only slow
_CONNECT = parallel._connect
_SESSIONS: list[EmbeddingBackend] = []
_CLUSTERS: dict[int, subprocess.Popen[str]] = {}  # by session, of those that trainer 0 has started
UP = ["up", "--servers", "3", "--spares", "0", "-k", "2", "-r", "1", "--end-with-parent"]
_LACKING = "torchrec.distributed.tests.test_sequence_model"


class _SequenceSharder(EmbeddingCollectionSharder):
    """Stands for a sharder of a test file that is not in the wheel; only tests of `DMPCollection` make one."""


def provide_missing() -> None:
    """Makes `torchrec.distributed.test_utils.test_sharding` importable, which wants a file that the wheel lacks."""
    try:
        importlib.import_module(_LACKING)
    except ModuleNotFoundError:
        lacking = types.ModuleType(_LACKING)
        lacking.TestEmbeddingCollectionSharder = _SequenceSharder  # type: ignore[attr-defined]
        sys.modules.setdefault("torchrec.distributed.tests", types.ModuleType("torchrec.distributed.tests"))
        sys.modules[_LACKING] = lacking


def mode() -> str:
    """What models are made of: one of `MODES`."""
    chosen = os.environ.get("TORCH_ECREC_ORACLE", MODES[0])
    if chosen not in MODES:
        raise ValueError(f"TORCH_ECREC_ORACLE must be one of {', '.join(MODES)}, got {chosen!r}")
    return chosen


def model_class() -> type[Any]:
    """What is in the place of TorchRec's `DistributedModelParallel`."""
    return DistributedModelParallel if mode() == "stock" else torch_ecrec.DistributedModelParallel


def swap() -> None:
    """Gives TorchRec's test modules our class, in this process."""
    provide_missing()
    os.environ.setdefault("TORCH_ECREC_LEASE_S", str(LEASE_S))
    if mode() != "stock":
        parallel._connect = {"memory": _in_memory, "cluster": _in_cluster, "up": _in_named}[mode()]
    for name in _MODULES:
        setattr(importlib.import_module(name), "DistributedModelParallel", model_class())  # noqa: B010


def examples(cls: type[unittest.TestCase]) -> type[unittest.TestCase]:
    """A class of tests, each with as many examples as `TORCH_ECREC_ORACLE_EXAMPLES` says, and no more than it had."""
    most = os.environ.get("TORCH_ECREC_ORACLE_EXAMPLES")
    for name in unittest.defaultTestLoader.getTestCaseNames(cls) if most else ():
        test = getattr(cls, name)
        own = getattr(test, "_hypothesis_internal_use_settings", None)  # Hypothesis has no public way to change it
        if own is not None:
            test._hypothesis_internal_use_settings = hypothesis.settings(
                own, max_examples=min(int(most), own.max_examples)
            )
    return cls


def restore() -> None:
    """Models of other tests are made as ever."""
    parallel._connect = _CONNECT


def _in_memory(job: JobSpec, settings: object, code: object, trainer: int, snapshot_every: int) -> FakeSession:
    return FakeSession(job, trainer)


def _in_cluster(*job_and_more: Any) -> EmbeddingBackend:
    """These tests close no model: all but the newest two leave, and their clusters end."""
    while len(_SESSIONS) >= MODELS_AT_ONCE:
        _close(_SESSIONS.pop(0))
    _SESSIONS.append(_CONNECT(*job_and_more))
    return _SESSIONS[-1]


def _in_named(job: JobSpec, settings: Any, code: object, trainer: int, snapshot_every: int) -> EmbeddingBackend:
    """Trainer 0 starts the cluster and says where it is."""
    cluster, address = None, [""]
    if trainer == 0:
        words = [sys.executable, "-m", "torch_ecrec", *UP]
        quiet = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        cluster = subprocess.Popen(words, **quiet)  # type: ignore[call-overload]
        host, port = json.loads(cluster.stdout.readline())["address"]
        address = [f"{host}:{port}"]
    if job.trainers > 1:
        dist.broadcast_object_list(address, src=0)
    settings = dataclasses.replace(settings or Settings.from_environment(), join=address[0])
    session = _in_cluster(job, settings, None, trainer, snapshot_every)
    if cluster is not None:
        _CLUSTERS[id(session)] = cluster
    return session


def _close(session: EmbeddingBackend) -> None:
    session.close()
    cluster = _CLUSTERS.pop(id(session), None)
    if cluster is not None:
        cluster.terminate()
        with cluster:
            assert cluster.wait(TIMEOUT_S) == 0, "torch-ecrec up"


def leave() -> None:
    """Ends the clusters that are left."""
    while _SESSIONS:
        _close(_SESSIONS.pop())


def answer_calls(number: int) -> None:
    """In one of `PROCESSES`: reads calls, pickled, from its standard input until nothing more comes.

    It answers each on its standard output with the text of what the call raised, or "". What calls print goes to its
    standard error.
    """
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    while True:
        try:
            function, environment, arguments = pickle.load(sys.stdin.buffer)
        except EOFError:
            return
        os.environ.update(environment)
        swap()
        raised = ""
        try:
            function(**arguments)
        except Exception:
            raised = traceback.format_exc()  # the exception itself may not travel
        finally:
            leave()
        pickle.dump(raised, answers)
        answers.flush()


class Processes:
    """Two processes that call functions of TorchRec's tests as rank 0 and 1; started once."""

    def __init__(self) -> None:
        self._children: list[Child] = []

    def call(self, function: Callable[..., Any], **arguments: Any) -> None:
        """Calls it on both, with `rank` and `world_size`; raises what one raised. None outlives an error."""
        if not self._children:
            self._children = [forked.begin(answer_calls, rank, stdout=subprocess.PIPE) for rank in range(2)]
        environment = {name: os.environ[name] for name in _ENVIRONMENT if name in os.environ}
        environment["MASTER_PORT"] = str(get_free_port())
        end_s = time.monotonic() + TIMEOUT_S
        try:
            for rank, child in enumerate(self._children):
                words = function, environment, {**arguments, "rank": rank, "world_size": 2}
                pickle.dump(words, child.stdin)
                child.stdin.flush()
            waiting = [child.stdout for child in self._children]
            while waiting:
                ready, _, _ = select.select(waiting, [], [], max(0.0, end_s - time.monotonic()))
                assert ready, f"{function.__name__} has not ended within {TIMEOUT_S:g} s"
                for answers in ready:
                    waiting.remove(answers)
                    if raised := pickle.load(answers):
                        raise RuntimeError(raised)
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Ends them."""
        while self._children:
            forked.end(self._children.pop())


PROCESSES = Processes()


class OracleProcesses:
    """Mixed into a `MultiProcessTestBase`: what its processes call is called in `PROCESSES`."""

    def _run_multi_process_test(self, *, callable: Callable[..., None], world_size: int, **kwargs: Any) -> None:
        assert world_size == 2
        PROCESSES.call(callable, **kwargs)


provide_missing()
