"""Carries the messages of `protocol` between processes.

node.py      a process on the data plane: one lock, an outbox, calls repeated until answered
calls.py     the data plane: calls to members by name; carried by one of
    sockets.py   TCP connections of its own
    rpc.py       torch.distributed.rpc (its worlds meet in rendezvous.py)
local.py     the data plane in one process, on a virtual clock, with faults
secret.py    who may speak: proofs of the cluster's secret, on both planes
control.py   the control channel to the coordinator: TCP, one JSON object per line
timers.py    actions at a later time
"""
