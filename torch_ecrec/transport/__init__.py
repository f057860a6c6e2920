"""How processes talk: the ways to carry the messages of `protocol`.

node.py      a process on the data plane: one lock, an outbox, calls repeated until answered
generations.py  the data plane: calls to the members of a world that is formed anew; carried by one of
    sockets.py   TCP connections of its own
    rpc.py       torch.distributed.rpc (the only module that imports it)
local.py     the data plane in one process, on a virtual clock, with faults
control.py   the control channel to the coordinator: TCP, one JSON object per line
timers.py    actions at a later time
"""
