"""The private names of the standard library. (`os._exit`, `sys._getframe`, `sys._current_frames` are documented.)"""

from __future__ import annotations

from types import FrameType

PATHLIB = "pathlib._local"
"""Module of the classes of `pathlib` in pickles that Python 3.13 has written; other releases say `pathlib`."""


def is_shutdown(frame: FrameType) -> bool:
    """Returns whether a frame is that of `threading._shutdown`, where a finished main thread waits for others.

    `threading.main_thread().is_alive()` is still true then, and callbacks of `atexit` come only afterwards.
    """
    return frame.f_globals.get("__name__") == "threading" and frame.f_code.co_name == "_shutdown"
