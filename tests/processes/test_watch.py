"""Who watches a cluster: it finds the coordinator again, and says when there is none any more."""

import queue
import threading
from typing import Any

import pytest

from torch_ecrec.demo.watch import Watch
from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.transport.control import ControlServer, LineConnection

WAIT_S = 300.0  # for anything at all: only a hang reaches it


class Coordinator:
    """Tells whoever asks how often it was asked, by `name`."""

    def __init__(self, name: str, port: int = 0) -> None:
        self.name, self.asked = name, 0
        self._server = ControlServer("127.0.0.1", port, self._on_message, lambda connection: None)
        self.port: int = self._server.address[1]
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()

    def _on_message(self, connection: LineConnection, message: dict[str, Any]) -> None:
        self.asked += 1
        connection.send({"by": self.name, "type": message["type"], "times": self.asked})

    def stop(self) -> None:
        self._server.close()
        self._thread.join(WAIT_S)


def test_it_finds_the_next_coordinator_and_says_when_there_is_none() -> None:
    said: queue.Queue[dict[str, Any]] = queue.Queue()
    closed: queue.Queue[str] = queue.Queue()
    gone: queue.Queue[str] = queue.Queue()
    first = Coordinator("first")
    with Watch(f"127.0.0.1:{first.port}", said.put, 2.0, on_closed=closed.put, on_gone=gone.put) as watch:
        assert said.get(timeout=WAIT_S) == {"by": "first", "type": "watch", "times": 1}
        watch.ask()
        assert said.get(timeout=WAIT_S) == {"by": "first", "type": "status", "times": 2}
        assert watch.leader is not None and watch.address == "127.0.0.1"
        first.stop()
        assert closed.get(timeout=WAIT_S)
        second = Coordinator("second", first.port)
        assert said.get(timeout=WAIT_S)["by"] == "second", "nobody had to ask"
        second.stop()
        assert gone.get(timeout=WAIT_S) and watch.leader is None
        watch.ask()  # nobody hears it
    assert gone.empty() and said.empty()


def test_where_nobody_answers_it_does_not_begin() -> None:
    one = Coordinator("one")
    one.stop()
    with pytest.raises(ClusterUnavailable), Watch(f"127.0.0.1:{one.port}", lambda message: None, 0.1):
        pass


def test_who_has_enough_is_not_told_of_the_end() -> None:
    one, told = Coordinator("one"), list[str]()
    with Watch(f"127.0.0.1:{one.port}", lambda message: None, 2.0, on_closed=told.append, on_gone=told.append):
        pass
    one.stop()
    assert told == []
