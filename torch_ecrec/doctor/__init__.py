"""Whether this machine can run torch-ecrec, and how to mend what cannot: `torch-ecrec doctor`.

    findings.py      what a check has found; all of them, as text and as JSON
    examination.py   the table of checks, and how they are run: each bounded in time, none may end the others
    software.py      Python, the packages, whether they load together, compiled kernels, settings
    trial.py         what is tried in a process of its own, since it may crash it
    machine.py       shared memory, limits of files and processes, memory, cores, this host's name
    cluster.py       the coordinator: reached, ours, of this version, with this secret, by the same clock
    link.py          between two hosts: round trip and bandwidth
    store.py         the place of checkpoints: written, listed, read, removed

Nothing slow and nothing that may be missing is imported before the check that needs it.
"""
