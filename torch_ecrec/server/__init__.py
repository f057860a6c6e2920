"""Shard servers: a process hosts slots; a slot applies steps, answers readers, and keeps parts of the dense model.

service.py       a server process: its slots, their messages, the placement, the era
process.py       that process, as its slots know it
slot.py          one incarnation of a slot: requests, steps, its life, what it tells the coordinator
inbox.py         pushes and loads that wait for their step
apply.py         what a step does to the records
reads.py         lookups and exports
snapshots.py     parts of the dense model
checkpoints.py   a slot's part in checkpoints: captured (capture.py), some rows first (saving.py)
slot_restore.py  a slot that begins anew from one
exporting.py     a slot that moves: the side that gives; importing.py: the side that takes

What makes a step survive, and brings a lost slot back, is in `torch_ecrec/durability`.
"""
