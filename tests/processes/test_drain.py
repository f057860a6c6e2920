"""`torch-ecrec drain` on real processes: slots leave servers while training goes on, and every bit stays what it is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from test_cluster import STEPS, check, cluster, run_undisturbed

from torch_ecrec.cli.main import main
from torch_ecrec.spec.job import CodeSpec


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    logs = tmp_path_factory.getbasetemp() / "undisturbed"
    logs.mkdir(exist_ok=True)
    return run_undisturbed(logs)


@pytest.mark.parametrize("transport", ["sockets", pytest.param("rpc", marks=pytest.mark.slow)])
def test_every_server_is_drained_in_turn_while_training_goes_on(
    tmp_path: Path, undisturbed: list[dict[str, Any]], transport: str, capsys: pytest.CaptureFixture[str]
) -> None:
    environment = {"TORCH_ECREC_TRANSPORT": transport}
    orders: dict[str, Any] = {"steps": STEPS, "hold": (10, 90), "pause_s": 0.05}
    with cluster(tmp_path, CodeSpec(3, 2, 1), spares=1, environment=environment, **orders) as running:
        trainer, join = running.children[0], running.supervisor.join
        assert trainer.expect("held") == "step 10"
        trainer.tell("go")
        before = ""
        for slot in range(3):
            server = running.supervisor.status().slots[slot].server
            if before:
                assert main(["drain", before, "--undo", "--join", join]) == 0
            assert main(["drain", server, "--join", join]) == 0
            assert f"drained: no slot is left on {server}" in capsys.readouterr().out
            before = server
        status = running.supervisor.status()
        assert [place.incarnation for place in status.slots] == [1, 1, 1]
        assert all(place.healthy and place.server != before for place in status.slots)
        assert main(["drain", "server-9", "--join", join]) == 2
        assert "no server is called 'server-9'" in capsys.readouterr().err
        trainer.tell("fast")
        assert trainer.expect("held") == "step 90", "training was not over when the last slot had moved"
        trainer.tell("go")
        results = [child.result() for child in running.children]
        events = [line for log in tmp_path.glob("*.log") for line in log.read_text(errors="replace").splitlines()]
        check(results, undisturbed, parities=1)
        assert sum("all of it is here" in line for line in events) == 3
        assert not any("asks slots" in line for line in events), "nothing was adopted, nothing decoded"
