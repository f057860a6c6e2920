"""Each rule of `docs/design.md` is taken out, and some schedule of the simulated cluster must notice. Not here:

- trainers' words of what is complete that are kept when they go back (`tests/unit/test_step_rule.py` has that);
- a new host that does not know the incarnations of all others from session_id: here whatever could do harm through that
  (Attach, Adopt, the next placement) teaches it first, and a server that is dead sends nothing.
"""

import pytest
from faults import THREE_TWO, found, hunt, hunt_at
from mutations import (
    acknowledged_again,
    ahead_not_sent_again,
    cut_again,
    decode_newest,
    early_ack,
    encode_newest,
    fold_twice,
    fold_unordered,
    forget_everything,
    forget_nothing,
    merge_as_they_come,
    never_settled,
    no_era,
    no_fence,
    no_freeze,
    no_roll_forward,
    no_undo,
    no_window,
    not_caught_up_counts,
    not_made_durable,
    parities_not_undone,
    rebuilt_too_early,
    records_not_undone,
    rows_acknowledge,
    short_log,
    snapshots_from_an_empty_holder,
    snapshots_not_copied,
    stale_confirmation,
    start_at_settled,
    void_stores_count,
)

from torch_ecrec.spec.job import CodeSpec

LOSING = dict(random_trainer_kills=4, trainers_return=True, steps=12, kill_probability=0.015)

MUTATIONS = {
    no_undo: hunt(begin=21),
    early_ack: hunt(),
    no_fence: hunt_at("Fold", "late", "crash_sender", verify_every=1),
    encode_newest: hunt(),
    decode_newest: hunt(begin=10),
    no_roll_forward: hunt(begin=8),
    stale_confirmation: hunt_at("Fold", "late_answer", "crash_after", begin=1, verify_every=1),
    snapshots_not_copied: hunt(begin=7),
    snapshots_from_an_empty_holder: hunt(
        code=CodeSpec(4, 1, 2), kills=((0, 2), (1, 2)), settle_first=False, random_kills=0, noise=0.0
    ),
    fold_twice: hunt(),
    fold_unordered: hunt(),
    merge_as_they_come: hunt(trainers=3),
    no_window: hunt(),
    ahead_not_sent_again: hunt(),
    never_settled: hunt(),
    rows_acknowledge: hunt(),
    forget_everything: hunt(begin=9),
    forget_nothing: hunt(steps=12),
    cut_again: hunt_at("Cut", "duplicate", kills=((0, 1),)),
    not_caught_up_counts: hunt_at(
        "Fold", "late", "crash_sender", to="server-5", code=THREE_TWO, spares=3, steps=5, kills=((1, 3),)
    ),
    rebuilt_too_early: hunt_at("Fold", "drop", to="server-3", steps=5, kills=((1, 3),), rebuild_chunk_bytes=1 << 20),
    acknowledged_again: hunt(begin=7),
    void_stores_count: hunt_at("Snapshot", "late", kills=((0, 1), (0, 3)), steps=5, verify_every=10),
    no_era: hunt(begin=8, **LOSING, late=0.3),
    no_freeze: hunt(200, begin=93, **LOSING, late=0.2),
    records_not_undone: hunt(**LOSING),
    parities_not_undone: hunt(**LOSING),
    not_made_durable: hunt(**LOSING),
    short_log: hunt(**LOSING),
    start_at_settled: hunt(200, begin=116, **LOSING),
}


@pytest.mark.parametrize("mutate", MUTATIONS, ids=lambda mutate: mutate.__name__)
def test_mutation_is_found(mutate):
    found(mutate, MUTATIONS[mutate])
