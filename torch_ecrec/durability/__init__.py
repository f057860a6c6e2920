"""What makes a step count: how a slot's steps survive losses, and how a lost slot comes back.

policy.py     the seam between a slot and what makes its steps survive: `Durability`
context.py    what a slot's parts are given: the slot and the process that hosts it, as far as a part may know them
holdings.py   what one life of a slot has: records, parities, log, what is missing, the step rule
parity.py     the policy "parity": deltas are folded into parities on other slots
streams.py    folds sent: the ordered stream of one slot's deltas to one holder
folding.py    folds received: parities of other slots' records, and the logs that can take folds back
adoption.py   the new host of a lost slot: the cut, and the slot's own log
rebuild.py    what is missing on the new host: decoded on first touch, the rest in the background
throttle.py   how fast the background reads: within a limit, and half of what links carry; moves, too
scrubber.py   looks for records and parities that are damaged
none.py       the policy "none": a step counts as soon as it is applied, and any loss is final

For experiments only, chosen by `spec/experiment.py`:

acknowledged_when_applied.py   parity, but a step counts as soon as it is applied, and may be lost with its slot
locked_ranges.py               parity, but a rebuild locks ranges of the slot, one after another

Knows messages, but not how they travel: whoever hosts a slot is a `HostContext` here.
"""

from __future__ import annotations

import functools

from torch_ecrec.durability.acknowledged_when_applied import AcknowledgedWhenApplied
from torch_ecrec.durability.locked_ranges import LockedRebuild
from torch_ecrec.durability.none import Unprotected
from torch_ecrec.durability.parity import Parity
from torch_ecrec.durability.policy import Policy
from torch_ecrec.spec.experiment import Experiment


def policy_of(protection: str, experiment: Experiment) -> Policy:
    """Returns the policy of a cluster's slots.

    Args:
        protection: as `CodeSpec.protection`.
        experiment: that the cluster makes.
    """
    if protection == "none":
        return Unprotected
    policy = AcknowledgedWhenApplied if experiment.acknowledges_when_applied else Parity
    return functools.partial(policy, rebuild=LockedRebuild) if experiment.ranges else policy
