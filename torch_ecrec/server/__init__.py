"""Shard servers: a process hosts slots; a slot applies steps, keeps parity for others and repairs itself after a loss.

step.py        the pure rule: which steps are applied, folded, acknowledged, settled
slot.py        one incarnation of a slot: records, pushes, lookups, snapshots
protection.py  folds sent and received, the cut of a lost slot
rebuild.py     the new host of a lost slot: adoption, decode on first touch, background rebuild
service.py     a server process: its slots, their messages, the placement
"""
