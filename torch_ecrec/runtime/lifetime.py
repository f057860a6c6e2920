"""How a process ends, or is ended when it hangs; and what its forked children must not keep.

    end_with_parent    ends this process when the supervisor that started it is gone, however that ended, or says so
    pass_over_words_to_scripts  ignores the signals by which a scheduler tells a script to save
    end_at_once        handles SIGTERM and SIGINT while there is nothing to be left in order
    keep_exit_code     whoever is told to end once more while the interpreter ends has the exit code that it had
    belongs_here       what a forked child lets go of
    end_if_it_hangs    ends it, in the end, if its thread waits for a process that will never answer
    ends_within        ends it if what is done takes longer
    end_with_stacks    ends it

A *forked child* (a worker of a `DataLoader`) has a copy of every open file. The end of a process is noticed by the end
of its connections, and they end when the last copy is closed; so a child closes its copies at once, and it shuts
nothing down, which would be done to the parent's connections as well.

Without imports that take time: a process whose parent dies while it starts should not load torch first.
"""

from __future__ import annotations

import atexit
import contextlib
import faulthandler
import fcntl
import gc
import os
import signal
import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Protocol

from torch_ecrec.compat.python import is_shutdown
from torch_ecrec.runtime.cores import ran_s
from torch_ecrec.runtime.threads import Worker, log_error

INTERRUPTED = 130  # the exit code
LOOK_S = 0.25
IDLE = 0.05  # of a core: a thread that uses less does not compute
THERE, COMPUTES = b".", b"c"  # how a process answers a probe: it is there, or it computes (`unlocked.py`)

# the parent, and being told to end --------------------------------------------------------------------


Handler = Callable[[int, FrameType | None], object]
SIGNALS = signal.SIGTERM, signal.SIGINT
TO_SCRIPTS = signal.SIGUSR1, signal.SIGUSR2  # they say "save" to a script, and a process without a handler dies of them
_parent_tells = False
_handler: Handler | signal.Handlers = signal.SIG_IGN  # handler of the parent's message, if the parent sends one


def end_with_parent(tells: bool) -> None:
    """Ends this process when its standard input closes: the supervisor that holds the other end is gone.

    It ends then also if it is stopped.

    Args:
        tells: the supervisor's word (`tell_to_end`) is what tells this process to end, and signals do not. Who sends
            them to every process of a job (scancel, systemd, an init that forwards them) does not mean that those who
            serve end before those whom they serve: the supervisor knows when.
    """
    global _parent_tells
    if tells:
        _parent_tells = True
        for number in (*SIGNALS, signal.SIGHUP):
            signal.signal(number, _say_whose_it_is)

    def watch() -> None:
        while words := os.read(0, 4096):  # not sys.stdin: its lock is taken when the interpreter ends
            for _ in words:
                if callable(_handler):
                    _handler(signal.SIGINT, None)  # at once: it has waited for whoever is to be waited for
        os._exit(0)

    _wake_when_told()
    Worker(watch, "parent", log_error).start()


def _wake_when_told() -> None:
    """Has the system continue this process, should it be stopped (SIGSTOP), when its standard input closes or speaks.

    Nobody may be left who would: it would be there for ever. `PR_SET_PDEATHSIG` is no way: it is tied to the thread
    that started this process, or to the fork server, whose end is not its parent's.
    """
    with contextlib.suppress(AttributeError, OSError):  # another system than Linux; a standard input that is no pipe
        fcntl.fcntl(0, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(0, fcntl.F_SETSIG, signal.SIGCONT)
        fcntl.fcntl(0, fcntl.F_SETFL, fcntl.fcntl(0, fcntl.F_GETFL) | os.O_ASYNC)


def _say_whose_it_is(number: int, frame: FrameType | None) -> None:
    """A signal handler that says who ends this process. (The log may be in use in this very thread.)"""
    name = signal.Signals(number).name
    with contextlib.suppress(OSError):
        os.write(2, f"torch-ecrec: {name} does not end process {os.getpid()}: who has started it does\n".encode())


def tell_to_end(parents_end: int) -> None:
    """Tells a process that ends with this one to end. `parents_end`: of the pipe to its standard input."""
    with contextlib.suppress(OSError):  # it has ended
        os.write(parents_end, b"\n")


def on_signals(handler: Handler | signal.Handlers) -> None:
    """Handles what tells this process to end: SIGTERM, SIGINT, or its parent's message (then on another thread).

    Call it on the main thread only.
    """
    global _handler
    if _parent_tells:
        _handler = handler
        return
    for number in SIGNALS:
        signal.signal(number, handler)


def end_at_once(number: int, frame: FrameType | None) -> None:
    """A signal handler that exits at once. An exception could get lost in an import, and nothing needs cleaning up."""
    os._exit(INTERRUPTED)


def pass_over_words_to_scripts() -> None:
    """Ignores the signals by which a job's scheduler tells scripts to save (Slurm's `--signal`).

    Child processes ignore them, too, unless they say otherwise.
    """
    for number in TO_SCRIPTS:
        signal.signal(number, signal.SIG_IGN)


def keep_exit_code() -> None:
    """Ignores SIGTERM and SIGINT once all exit handlers registered after this call have run.

    The interpreter removes its signal handlers some 10 ms before the process ends. A signal in between would end the
    process as one without handlers. An ignored signal stays ignored.
    """
    atexit.register(on_signals, signal.SIG_IGN)


# forked children --------------------------------------------------------------------------------------


def freeze() -> None:
    """Keeps the interpreter from visiting all of torch's objects at its end, which takes 0.7 s of a core.

    It is for our own processes only: garbage that exists now is never collected.
    """
    gc.collect()
    gc.freeze()


class Owned(Protocol):
    """An object of this process that has files or threads."""

    def on_forked(self) -> None:
        """Called first in a forked child: closes its copies of files, and waits for nothing.

        Locks may be held by threads that the child does not have.
        """


_owned: weakref.WeakSet[Owned] = weakref.WeakSet()  # also in children of children
_registering = threading.Lock()
_registered = False


def belongs_here(thing: Owned) -> None:
    """Makes every forked child call `thing.on_forked`, as long as `thing` lives."""
    global _registered
    with _registering:
        if not _registered:
            os.register_at_fork(after_in_child=_let_go)
            _registered = True
    _owned.add(thing)


def _let_go() -> None:
    global _registering
    _registering = threading.Lock()
    for thing in list(_owned):
        thing.on_forked()


# hanging ----------------------------------------------------------------------------------------------


def end_if_it_hangs(thread: threading.Thread, knows: Callable[[], bool], limit_s: float, why: str, code: int) -> None:
    """Ends this process, with all stacks on standard error, if it waits for others in vain for `limit_s` on end.

    A thread *hangs* that is inside a call of torch.distributed, or a backward, the same one all that time, and does not
    compute. The process is ended if `thread` hangs, unless it `knows`: then what it does is its own affair. It is also
    ended if its main thread has come to its end, and all threads hang for whose end the interpreter waits.

    Args:
        thread: the one that trains.
        knows: whether it has been told, by an exception, that there is nothing to wait for.
        why: for standard error.
        code: to exit with.
    """

    def watch() -> None:
        looks: dict[int, _Look] = {}
        while True:
            frames = sys._current_frames()
            looks = {
                one.ident: _Look(one, frames[one.ident], looks.get(one.ident))
                for one in threading.enumerate()
                if one.ident is not None and one.ident in frames
            }
            awaited = [] if knows() else [thread]
            if _is_over(frames.get(threading.main_thread().ident or 0)):
                ours = (threading.main_thread(), threading.current_thread())
                awaited = [one for one in threading.enumerate() if not one.daemon and one not in ours]
            found = [looks.get(one.ident or 0) for one in awaited]
            if found and all(look is not None and look.hangs_s >= limit_s for look in found):
                end_with_stacks(f"torch-ecrec: {why}; this process waited for others, for {limit_s:g} s in vain", code)
            del frames, found
            time.sleep(LOOK_S)

    Worker(watch, "hanging", log_error).start()


@contextlib.contextmanager
def ends_within(limit_s: float, why: str, code: int) -> Iterator[None]:
    """Ends this process, with all stacks on standard error, if the block takes longer than `limit_s`."""
    watch = threading.Timer(
        limit_s, lambda: end_with_stacks(f"torch-ecrec: {why} within {limit_s:g} s: it hangs", code)
    )
    watch.daemon = True
    watch.start()
    try:
        yield
    finally:
        watch.cancel()


class _Look:
    """The state of one thread at one moment. `hangs_s`: for how long it has been seen to hang."""

    def __init__(self, thread: threading.Thread, frame: FrameType, before: _Look | None) -> None:
        self._at_s, self._ran_s = time.monotonic(), ran_s(thread.native_id)
        self._stack: list[tuple[int, int]] = []
        waits = _waits_for_others(frame)
        at: FrameType | None = frame
        while at is not None:
            self._stack.append((id(at), at.f_lasti))
            at = at.f_back
        self.hangs_s = 0.0
        if before is not None and waits and before._stack == self._stack:
            passed_s = min(self._at_s - before._at_s, 2 * LOOK_S)  # not while this process was stopped
            if self._ran_s - before._ran_s <= IDLE * passed_s:
                self.hangs_s = before.hangs_s + passed_s


def _waits_for_others(frame: FrameType | None) -> bool:
    """Returns whether a thread, at this frame, is in a library's call that may wait for other trainers."""
    while frame is not None:
        module = str(frame.f_globals.get("__name__", ""))
        if not module.startswith(("torch.", "torchrec.", "torch_ecrec.", "threading", "concurrent.", "contextlib")):
            return False
        if module.startswith(("torch.distributed.", "torch.autograd", "torch.nn.parallel", "torchrec.distributed.")):
            return not module.startswith("torch.distributed.checkpoint")
        frame = frame.f_back
    return False


def _is_over(frame: FrameType | None) -> bool:
    """Returns whether the main thread has ended, and waits for others before the interpreter ends."""
    while frame is not None and frame.f_back is not None:
        frame = frame.f_back
    return frame is not None and is_shutdown(frame)


def end_with_stacks(text: str, code: int) -> None:
    """Ends this process at once, with the stacks of its threads on standard error."""
    with contextlib.suppress(OSError):  # nobody to tell, or no room: it ends all the same
        print(text, file=sys.stderr, flush=True)
        faulthandler.dump_traceback(file=sys.stderr)
    os._exit(code)
