"""Stops a server of a test's cluster in the middle of a fold: every process that finds this on its path runs it first.

ECREC_TEST_STOP is "HOLDER SOURCE STEP": the process that hosts slot HOLDER stops itself (SIGSTOP) once it has folded
the first of the parts that slot SOURCE sent it of STEP.
Its first host: not the one that takes its place. With ECREC_TEST_STOP_HOW=hang only its node stops, for ever; with
"spin SECONDS" or "wait SECONDS" it computes or waits in one call, which holds the interpreter's lock.
"""

import os
import signal
import sys
import threading

if os.environ.get("ECREC_TEST_STOP"):
    sys.path.append(os.path.dirname(os.path.dirname(__file__)))
    import held_lock

    from torch_ecrec.durability import folding

    holder, source, step = map(int, os.environ["ECREC_TEST_STOP"].split())
    stopped = False

    class Parts(list):  # type: ignore[type-arg]
        """Stops the process before the second is taken."""

        def __iter__(self):  # type: ignore[no-untyped-def]
            for number, part in enumerate(super().__iter__()):
                how = os.environ.get("ECREC_TEST_STOP_HOW", "").split()
                if number == 1 and how[:1] == ["hang"]:
                    threading.Event().wait()
                elif number == 1 and how:
                    getattr(held_lock, how[0])(float(how[1]))
                elif number == 1:
                    os.kill(os.getpid(), signal.SIGSTOP)
                yield part

    def fold(self, request, _fold=folding.Folds._fold):  # type: ignore[no-untyped-def]
        global stopped
        here = self.held.index, self.held.incarnation, request.source, request.step
        if here == (holder, 0, source, step) and not stopped:
            stopped = True
            request.positions = Parts(request.positions)
        _fold(self, request)

    folding.Folds._fold = fold
