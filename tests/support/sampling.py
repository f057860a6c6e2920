"""Which tests run when all are asked for: the suite is larger than anybody wants to wait for, so they take turns.

    make test                      the tests of turn 0: some minutes
    make test TURN=5               those of turn 5
    make test TURN=all             all but the slow ones: about an hour
    make test ARGS=tests/unit/test_records.py     what is named runs as a whole

`TURNS` turns visit everything; CI takes another one with each commit. Most tests run in every turn. Those of the files
`TAKE_TURNS`, which sweep, or start processes, run in one of them each, but for what is marked `smoke`.

The tests that are marked slow take turns of their own, `SLOW_TURNS`, with `-m slow --turn N`.
"""

from __future__ import annotations

import zlib
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TypeVar

TURNS = 10
SLOW_TURNS = 360
"""So many visit all slow tests."""
SLOW_LIMIT_S = 1800.0
"""A slow test that is given more is refused: it would be too long for a turn, so nobody would run it."""
TIER_FRAMES = (0, 2, 0, 3, 7)
"""In turn N all simulated servers have the N-th of these frames, and the rest of their records in tiers; 0: no tiers.

Round and round, and every `TURNS` one further, so that a test whose turn comes again meets others. So the sweeps meet
tiers, and no turn has more tests for it.
"""

SWEEPS = (  # runs of the simulated cluster, hundreds of them
    *("announced_tiers", "captures", "cuts", "damaged_captures", "damaged_memory", "early_loads", "exploration"),
    *("fuzz", "held_tiers", "identities", "import_restores", "leaders", "links", "lives", "loading", "lost_hosts"),
    *("models", "moves", "mutations", "optimizers_cluster", "overwrites", "partial", "partial_saves", "power"),
    *("random_kills", "restores", "restores_early", "scrubbing", "silence", "simulation", "slow", "troubled_tiers"),
    *("troubled_tiers_mutations", "warmed"),
)
PROCESSES = (  # clusters of real processes, or many of them
    *("bench_gpu", "bench_runs", "chaos_hosts", "checkpointing", "checkpoints", "clean_end", "cli"),
    *("cluster", "columns", "coordinator_end", "demo_runs", "doctor_faults", "drain", "exit_codes", "experiments_run"),
    *("flips", "fork_server", "given_numbers_run", "hanging_store", "hangs", "heartbeats", "held_lock"),
    *("host_clusters", "hostile", "hosts", "ipv6", "killed_early", "lifetime", "membership", "mistakes"),
    *("oracle_model_parallel", "oracle_optim", "oracle_pipelines", "oracle_sequences", "oracle_shardings"),
    *("public_names", "quickstart", "real_loops", "reduce", "rehearsal", "run", "second_jobs", "secret", "shadows"),
    *("progress_shown", "signals", "slow_server", "sockets", "standbys", "started_again"),
    *("status_answers", "supervisor"),
    *("table_optimizers", "tensorboard", "tiers_run", "told_to_end", "torchrec", "transport", "unclosed"),
    *("unlocked", "upgrade", "web", "web_cluster", "web_page"),
)
LOOPS = (
    *("announcing", "attach", "compiled", "given_numbers", "look_ahead", "loops", "managed", "mixed", "pipelines"),
    *("probe", "reader", "values"),
)
STORES = (
    *("importing", "storage_catalog", "storage_hostile", "storage_parts", "storage_s3", "storage_saves"),
    "storage_sweeps",
)
TOOLS = (
    *("bench_checkpoint", "bench_codec", "bench_messages", "bench_operators", "bench_optimizers", "bench_partial"),
    *("bench_report", "bench_scaling", "bench_seals", "bench_storage", "bench_stores", "chaos_schedule", "demo"),
    *("demo_report", "dist", "experiments", "guide", "overhead", "packing", "troubleshooting"),
)
OTHERS = (
    *("accrual", "codec", "compat", "defaults", "election", "election_explored", "halves", "identity", "kernel_cache"),
    *("layout", "leadership", "optimizers", "reachability", "records"),
)
TAKE_TURNS = {
    *(f"simulated/test_{name}.py" for name in SWEEPS),
    *(f"processes/test_{name}.py" for name in PROCESSES),
    *(f"unit/test_{name}.py" for name in (*LOOPS, *STORES, *TOOLS, *OTHERS)),
}
"""Below `tests`: the files whose tests take more than a few seconds of a core together, and those of tools."""

T = TypeVar("T")


def frames_of(turn: int) -> int:
    """Returns how many frames simulated servers have in a turn; 0: all is in memory."""
    return TIER_FRAMES[(turn + turn // TURNS) % len(TIER_FRAMES)]


def kept(tests: Sequence[T], turn: int, name: Callable[[T], str], takes_turns: Callable[[T], bool]) -> list[T]:
    """The tests of a turn, in their order.

    Args:
        name: of a test, with its case in brackets: "tests/unit/test_codec.py::test_fold[4-2]".
        takes_turns: whether it does not run every time.
    """
    cases: dict[str, list[T]] = defaultdict(list)
    for test in tests:
        cases[name(test).partition("[")[0]].append(test)
    out = set()
    for function, those in cases.items():
        first = turn + zlib.crc32(function.encode())  # so that a turn has as much as another
        for number, test in enumerate(those):
            if takes_turns(test) and (number + first) % TURNS:
                out.add(id(test))
    return [test for test in tests if id(test) not in out]
