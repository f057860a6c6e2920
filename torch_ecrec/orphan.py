"""A process that ends when the one that started it is gone, however that ended.

Without imports that take time: a process whose parent dies while it starts should not load torch first.
"""

from __future__ import annotations

import os
import threading


def end_with_parent() -> None:
    """Ends this process when its standard input closes: the supervisor that holds the other end is gone."""

    def watch() -> None:
        while os.read(0, 4096):  # not sys.stdin: its lock is taken when the interpreter ends
            pass
        os._exit(0)

    threading.Thread(target=watch, name="parent", daemon=True).start()
