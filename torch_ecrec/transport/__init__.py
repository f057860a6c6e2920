"""How processes talk: the messages and the ways to carry them.

wire.py      requests, answers, outcomes
node.py      a process on the data plane: one lock, an outbox, calls repeated until answered
rpc.py       the data plane over torch.distributed.rpc (the only module that imports it)
local.py     the data plane in one process, on a virtual clock, with faults
control.py   the control channel to the coordinator: TCP, one JSON object per line
timers.py    actions at a later time
"""
