"""What makes a step count: how a slot's steps survive losses, and how a lost slot comes back.

policy.py     the seam between a slot and what makes its steps survive: `Durability`
context.py    what a slot's parts are given: the slot and the process that hosts it, as far as a part may know them
holdings.py   what one life of a slot has: records, parities, log, what is missing, the step rule
parity.py     the policy "parity": deltas are folded into parities on other slots
streams.py    folds sent: the ordered stream of one slot's deltas to one holder
folding.py    folds received: parities of other slots' records, and the logs that can take folds back
adoption.py   the new host of a lost slot: the cut, and the slot's own log
rebuild.py    what is missing on the new host: decoded on first touch, the rest in the background
scrubber.py   looks for records and parities that are damaged
none.py       the policy "none": a step counts as soon as it is applied, and any loss is final

Knows messages, but not how they travel: whoever hosts a slot is a `HostContext` here.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch_ecrec.durability.none import Unprotected
from torch_ecrec.durability.parity import Parity
from torch_ecrec.durability.policy import Policy

POLICIES: Mapping[str, Policy] = {"parity": Parity, "none": Unprotected}  # by `CodeSpec.protection`
