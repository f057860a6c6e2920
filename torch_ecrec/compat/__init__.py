"""The private names of other libraries that we need, all in one place: a module for each library.

    numba.py      the cache on disk of compiled functions
    python.py     the standard library
    rpc.py        torch.distributed.rpc; only `transport/rpc.py` imports it, since it takes a while to load
    torch.py      tensors, modules, optimizers, torch.compile, readers, checkpoints
    torchrec.py   the sharded model, wrappers around collections, maps of ids, the planner

A name is private here if it, or a module that it comes from, begins with an underscore, and its library does not
document it. Another release may move it or give it another meaning. So nobody but these modules names one
(`tests/unit/test_architecture.py` looks), no class of ours outside has an attribute of such a name, and each name has a
test against the installed release that fails if it is no longer there (`tests/unit/test_compat.py`): what to look at
first when the pinned set moves. What differs between two releases that are both supported is told apart here, too.

Docstrings say what a name is, why no public one does, and where it is known since which release it is so. All of them
are so from torch 2.13.0, torchrec 1.8.0 and numba 0.68.1, the oldest that were tried, to the newest in `requirements/`.

Nothing is imported here: a process that compiles kernels does not load torch, and a server does not load TorchRec.
"""
