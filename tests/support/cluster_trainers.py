"""Small trainers of a cluster of real processes, as a test holds them: `cluster_child.py` at the other end of pipes."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import subprocess
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import forked
import pytest
from cluster_child import Orders

LIMIT_S = 300.0  # for anything that is waited for: only a hang reaches it
ENVIRONMENT = {"TORCH_ECREC_HEARTBEAT_S": "0.2", "TORCH_ECREC_GIVE_UP_S": "240", "OMP_NUM_THREADS": "1"}
LEASE_S = 240.0  # nobody is taken for lost who is only slow
ENVIRONMENT |= {"TORCH_ECREC_LEASE_S": str(LEASE_S)}


class Child:
    """A trainer process. `more`: of its environment; `log_name`: where in `logs` it writes what it says."""

    def __init__(self, orders: Orders, logs: Path, more: Mapping[str, str] | None = None, log_name: str = "") -> None:
        self.log = logs / (log_name or f"trainer-{orders.trainer}.log")
        with self.log.open("wb") as log:
            environment = {**os.environ, **ENVIRONMENT, "TORCH_CPP_LOG_LEVEL": "ERROR", **(more or {})}
            words = [json.dumps(vars(orders))]
            self.process = forked.start("cluster_child", words, environment, subprocess.PIPE, log.fileno())
        self._said: queue.Queue[dict[str, Any] | None] = queue.Queue()  # None: no more
        threading.Thread(target=self._listen, daemon=True).start()

    def _listen(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._said.put(json.loads(line))
        self._said.put(None)

    def expect(self, kind: str) -> Any:
        """The next thing it says, which must be of this kind."""
        try:
            message = self._said.get(timeout=LIMIT_S)
        except queue.Empty:
            pytest.fail(f"no {kind!r} of pid {self.process.pid} within {LIMIT_S:g} s")
        assert message is not None, f"it ended with {self.process.wait(LIMIT_S)} instead of {kind!r}"
        assert kind in message, f"{message} instead of {kind!r}"
        return message[kind]

    def tell(self, word: str) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        self.process.stdin.flush()

    def result(self) -> dict[str, Any]:
        """What it says when it is done; it then ends by itself."""
        result: dict[str, Any] = self.expect("done")
        assert self.process.wait(LIMIT_S) == 0
        return result

    def end(self) -> None:
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):  # what was not read any more
                pipe.close()
