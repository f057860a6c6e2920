"""Records that do not fit in memory: most of them in a file, those in use in *frames* of memory.

`tiered.py` is the store, `log.py` says where in the file a record is, `disk.py` has the file and reads many of its
places at once, `budget.py` shares a server's memory among its stores. `kernels.py` has the loops.
"""
