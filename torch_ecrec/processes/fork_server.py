"""Processes that are forked from one that has loaded everything: each begins at once, where an interpreter of its own
takes two seconds of a core to load torch and the kernels; and they share the memory of what is loaded.

    ForkServer     starts it, and asks it for processes; clusters of one process share one (`ForkServer.shared`)
    Forked         one of them; what is used of `subprocess.Popen`
    is_available   whether this system can (Linux from 5.4 on)

The fork server has one thread, and does nothing but fork, and tell how a child has ended. A child is what `python -m
MODULE ARGUMENTS` would be: with its own session, environment, folder, standard streams and command line. When the
process that asks is gone, so is the fork server; what becomes of the children is theirs to say (`runtime/lifetime.py`).
When the fork server dies they live on; nobody then learns their exit codes (`UNKNOWN`), and the next start makes
another. So it does where one hangs: does not answer, and does not compute.

Python's own `multiprocessing.forkserver` will not do: each of its children runs the script of the process that asked
once more, and a cluster starts from any user's script, with or without `if __name__ == "__main__"`.

On the way there: the number of the request, with five files: what to run (JSON), the folder, standard input, output and
error. On the way back, one of `_STARTED` (a pid and the request, with a pidfd), `_FAILED` (an errno and the request)
and `_ENDED` (a pid, and what `waitpid` says).
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import errno
import importlib
import json
import os
import re
import runpy
import select
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, ClassVar, NoReturn

from torch_ecrec.processes.children import end_of, with_own_path
from torch_ecrec.runtime.cores import Idle, process_wanted_s
from torch_ecrec.runtime.lifetime import SIGNALS, TO_SCRIPTS, belongs_here, freeze

UNKNOWN = 255  # exit code of a process whose fork server is gone
START_S, ANSWER_S = 60.0, 10.0  # without computing: until the first answer, for which all is loaded; until others
IDLE = 0.02  # of a core: a process that uses less, and waits for less, does not compute
TELL_S = 10.0  # from a process's end until the fork server has told it, if it lives: after that it hangs
LOOK_S = 0.2
TICK_S = 0.001
TITLE_BYTES = 600  # room for the command line of a child
# Variables that nothing reads while it is loaded: our own (`spec/settings.py`), a shell's, and pytest's.
READ_LATER = re.compile(r"TORCH_ECREC_\w+|PWD|OLDPWD|SHLVL|_|PYTEST_CURRENT_TEST")
_ASKED, _REPLY = struct.Struct("<q"), struct.Struct("<cqq")
_STARTED, _FAILED, _ENDED = b"s", b"f", b"e"


def is_available() -> bool:
    """Returns whether processes can be forked, and waited for, as it is done here."""
    if not (hasattr(os, "pidfd_open") and hasattr(os, "memfd_create")):
        return False
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError:  # an older kernel, or a sandbox
        return False
    return True


class Forked:
    """A process that the fork server has started. `stdin`: the writing end of a pipe to it; `stdout`: see `start`."""

    def __init__(self, server: ForkServer, pid: int, pidfd: int) -> None:
        self.pid, self.returncode = pid, None  # type: tuple[int, int | None]
        self.stdin: IO[bytes] | None = None
        self.stdout: IO[bytes] | None = None
        self._server, self._pidfd, self._gone_s = server, pidfd, 0.0
        self.told_s = TELL_S  # after its end; 0: nobody will tell

    def poll(self) -> int | None:
        """The exit code (of a signal: negative), or None while it lives."""
        return self._server.poll(self)

    def wait(self, timeout: float | None = None) -> int:
        """Waits for its end. Raises subprocess.TimeoutExpired."""
        deadline_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            left_s = LOOK_S if deadline_s is None else deadline_s - time.monotonic()
            if left_s <= 0:
                raise subprocess.TimeoutExpired(f"process {self.pid}", timeout or 0.0)
            self.await_end(min(left_s, LOOK_S))
        return code

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended: its pid may be another's then."""
        self._server.send_signal(self, number)

    def terminate(self) -> None:
        """Asks the process to end, by SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Ends the process at once, by SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def is_gone(self) -> bool:
        """Returns whether it has ended, and for so long that its exit code should have been told."""
        if not _is_readable(self._pidfd, 0.0):
            return False
        self._gone_s = self._gone_s or time.monotonic()
        return time.monotonic() - self._gone_s >= self.told_s

    def signal(self, number: int) -> None:
        """Sends a signal. While nobody closes what tells its end."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._pidfd, number)

    def end_with(self, code: int) -> None:
        """Notes the exit code of a child."""
        self.returncode = code
        self.let_go()

    def let_go(self) -> None:
        """Closes what tells its end."""
        if self._pidfd >= 0:
            os.close(self._pidfd)
            self._pidfd = -1

    def await_end(self, limit_s: float) -> None:
        """Waits until it has ended, or for so long. (Meanwhile another thread may have noted its end: no harm.)"""
        if _is_readable(self._pidfd, limit_s):
            time.sleep(TICK_S)  # the fork server tells its exit code now


class ForkServer:
    """Starts processes by forking one that has loaded what they need.

    Args:
        preload: what is loaded: MODULE, or MODULE:FUNCTION, which is called. (What fails is left to the children, whose
            own import fails with the same words, where their words are read.)
        environment: of the fork server: variables that libraries read as they are loaded hold for all children.

    It is started with the first process, and again if it was lost.
    """

    _all_shared: ClassVar[dict[object, ForkServer]] = {}
    _sharing: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, preload: Sequence[str], environment: Mapping[str, str]) -> None:
        self._preload = tuple(preload)
        self._environment = {"OPENBLAS_NUM_THREADS": "1", **environment}  # its threads would not survive a fork
        self._users = 1
        self._process: subprocess.Popen[bytes] | None = None
        self._sock: socket.socket | None = None
        self._starting, self._receiving = threading.Lock(), threading.Lock()
        self._children: dict[int, Forked] = {}  # that live, as far as is known
        self._reply: Forked | OSError | None = None
        self._words = -1  # a file with what the fork server has said
        self._number, self._answered = 0, False  # of the last request; whether this fork server has answered one
        belongs_here(self)

    @classmethod
    def shared(cls, preload: Sequence[str], environment: Mapping[str, str]) -> ForkServer:
        """One that whoever asks for the same loads, and closes, has in common; the last one's `close` ends it.

        Its environment is that of who asked first: all have the same, but for what nothing reads as it is loaded.
        """
        read = {name: value for name, value in environment.items() if not READ_LATER.fullmatch(name)}
        key = (tuple(preload), frozenset(read.items()))
        with cls._sharing:
            found = cls._all_shared.get(key)
            if found is None:
                found = cls._all_shared[key] = cls(preload, environment)
            else:
                found._users += 1
            return found

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        environment: Mapping[str, str],
        stdout: int | None = None,
        stderr: int | None = None,
        look: Callable[[], None] = lambda: None,
    ) -> Forked:
        """Starts `python -m module *arguments`, in a session of its own.

        Args:
            module, arguments: what to run.
            environment: all that it has.
            stdout: a file; None: ours; subprocess.PIPE: a pipe, `Forked.stdout`.
            stderr: a file; None: ours.
            look: called while the fork server is waited for, which loads at first; may raise. (A process that begins
                all the same finds its standard input closed.)

        Raises:
            OSError: it cannot be started.
        """
        with contextlib.ExitStack() as files:
            while not self._starting.acquire(timeout=LOOK_S):  # another cluster's process is started
                look()
            files.callback(self._starting.release)
            spec = _file_of({"module": module, "arguments": list(arguments), "environment": dict(environment)})
            files.callback(os.close, spec)
            folder = os.open(".", os.O_PATH)  # also one that has been removed
            files.callback(os.close, folder)
            stdin, ours = os.pipe()
            files.callback(os.close, stdin)
            unused = contextlib.ExitStack()
            files.enter_context(unused)
            unused.callback(os.close, ours)
            read = -1
            if stdout == subprocess.PIPE:
                read, stdout = os.pipe()
                files.callback(os.close, stdout)
                unused.callback(os.close, read)
            streams = [stdin, 1 if stdout is None else stdout, 2 if stderr is None else stderr]
            child = self._ask([spec, folder, *streams], look)
            unused.pop_all()
        child.stdin = os.fdopen(ours, "wb")
        child.stdout = os.fdopen(read, "rb") if read >= 0 else None
        return child

    @property
    def pid(self) -> int | None:
        """Its number, or None where it was not started."""
        return None if self._process is None else self._process.pid

    def poll(self, child: Forked) -> int | None:
        """The exit code of a child, or None while it lives."""
        with self._receiving:
            self._receive()
            if child.returncode is None and child.is_gone():
                if child.told_s:  # it hangs, and will tell nobody's
                    self._lose()
                if self._children.get(child.pid) is child:
                    del self._children[child.pid]
                child.end_with(UNKNOWN)
            return child.returncode

    def send_signal(self, child: Forked, number: int) -> None:
        """To a child, unless it has ended. (Another thread may learn that at any moment, and close its pidfd.)"""
        with self._receiving:
            self._receive()
            if child.returncode is None:
                child.signal(number)

    def close(self) -> None:
        """Ends the fork server, unless others use it, too; children live on. Each user calls it once."""
        with self._sharing:
            self._users -= 1
            if self._users > 0:
                return
            for key in [key for key, one in self._all_shared.items() if one is self]:
                del self._all_shared[key]
        self._end()

    def _end(self) -> None:
        with self._receiving:
            self._lose()
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None
        if self._words >= 0:
            os.close(self._words)
            self._words = -1
        atexit.unregister(self._end)

    def on_forked(self) -> None:
        """Lets go of everything in a forked child: it is its parent's."""
        if self._sock is not None:
            self._sock.close()
        if self._words >= 0:
            os.close(self._words)
            self._words = -1
        for child in self._children.values():
            child.let_go()
        self._children, self._process, self._sock = {}, None, None
        self._starting, self._receiving = threading.Lock(), threading.Lock()
        ForkServer._all_shared, ForkServer._sharing = {}, threading.Lock()

    # the way there and back ------------------------------------------------------------------------------

    def _ask(self, files: list[int], look: Callable[[], None]) -> Forked:
        sock = self._sock if self._sock is not None else self._begin()
        self._reply, self._number = None, self._number + 1
        asked = self.pid or 0
        idle = Idle(lambda: process_wanted_s(asked), LOOK_S, IDLE)
        with contextlib.suppress(ConnectionError):  # it has died: its end is read below
            socket.send_fds(sock, [_ASKED.pack(self._number)], files)
        while True:
            reply = self._answer()
            if isinstance(reply, OSError):
                raise reply
            if reply is not None:
                return reply
            if self._sock is not sock:
                raise OSError(f"the process that starts others has died{self._last_words()}")
            if idle.look() > (limit_s := ANSWER_S if self._answered else START_S):
                self._end()  # the next start makes another
                raise OSError(f"the process that starts others hangs: no answer, nor work, for {limit_s:g} s")
            look()
            _is_readable(sock.fileno(), LOOK_S)

    def _last_words(self) -> str:
        """Returns the last words of the fork server that has died."""
        assert self._process is not None
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(ANSWER_S)
        said = os.pread(self._words, os.fstat(self._words).st_size, 0).decode(errors="replace")
        code = self._process.poll()
        return f" (exit code {code}); {end_of(said, 'what it said')}" if said.strip() else f" (exit code {code})"

    def _answer(self) -> Forked | OSError | None:
        with self._receiving:
            self._receive()
            return self._reply

    def _begin(self) -> socket.socket:
        self._end()
        self._words = os.memfd_create("torch-ecrec-words")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            words = [
                sys.executable,
                "-P",
                "-m",
                "torch_ecrec.processes.fork_server",
                str(theirs.fileno()),
                *self._preload,
            ]
            self._process = subprocess.Popen(
                [*words, " " * TITLE_BYTES],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=self._words,
                env=with_own_path(self._environment),
                pass_fds=[theirs.fileno()],
                # Ctrl-C reaches us, not it. In our session: when we are gone, the kernel ends it even if it is stopped
                # (a process group that becomes orphaned gets SIGHUP and SIGCONT, if a process of it is stopped).
                process_group=0,
            )
        atexit.register(self._end)
        ours.setblocking(False)
        self._sock, self._answered = ours, False
        return ours

    def _receive(self) -> None:
        """Takes what the fork server has told. Under the lock."""
        while self._sock is not None:
            try:
                data, files, _, _ = socket.recv_fds(self._sock, _REPLY.size, 1)
            except BlockingIOError:
                return
            except ConnectionError:
                data, files = b"", []
            if not data:  # it has died
                self._lose()
                return
            for file in files:
                os.set_inheritable(file, False)
            kind, number, more = _REPLY.unpack(data)
            if not self._answered:
                self._answered = True
                self._repeat()
            if kind == _STARTED:
                self._take(number, files, more == self._number)
            elif kind == _FAILED and more == self._number:
                self._reply = OSError(number, os.strerror(number))
            elif number in self._children:
                self._children.pop(number).end_with(os.waitstatus_to_exitcode(more))

    def _repeat(self) -> None:
        """Says what the fork server has said while it loaded."""
        said = os.pread(self._words, os.fstat(self._words).st_size, 0)
        if said and sys.__stderr__ is not None:
            with contextlib.suppress(OSError):  # ours may be full, or closed
                os.write(2, said)

    def _take(self, pid: int, files: list[int], asked: bool) -> None:
        """A child. `asked`: by the last request; else nobody waits for it any more."""
        if not files:  # there was no room for its pidfd. Whoever asked is told, and closes its standard input
            self._reply = OSError(errno.EMFILE, os.strerror(errno.EMFILE)) if asked else self._reply
            return
        child = self._children[pid] = Forked(self, pid, files[0])
        if asked:
            self._reply = child
        else:
            child.signal(signal.SIGKILL)

    def _lose(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None
        for child in self._children.values():
            child.told_s = 0.0
        self._children = {}  # the next fork server's may have their numbers


def _is_readable(file: int, limit_s: float) -> bool:
    if file < 0:  # closed by another thread, which knows what became of it
        return True
    looked = select.poll()  # `select` takes no file above 1023
    looked.register(file, select.POLLIN)
    return bool(looked.poll(limit_s * 1000))


def _file_of(spec: object) -> int:
    """Returns a file in memory, at its beginning: an environment may be longer than a message."""
    file = os.memfd_create("torch-ecrec-start")
    try:
        with os.fdopen(file, "wb", closefd=False) as out:
            out.write(json.dumps(spec).encode())
        os.lseek(file, 0, os.SEEK_SET)
    except BaseException:
        os.close(file)
        raise
    return file


# the fork server itself -----------------------------------------------------------------------------------


def _load(preload: Sequence[str]) -> None:
    for word in preload:
        module, _, function = word.partition(":")
        with contextlib.suppress(Exception):  # the children meet it again, and say so where their words are read
            loaded = importlib.import_module(module)
            if function:
                getattr(loaded, function)()


def _serve(sock: socket.socket) -> list[int]:
    """Forks when it is asked to, until the other end is gone. Returns in each child, with its files."""
    woken, wake = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    while True:
        ready, _, _ = select.select([sock.fileno(), woken], [], [])
        if woken in ready:
            with contextlib.suppress(BlockingIOError):
                os.read(woken, 4096)
            _tell_ends(sock)
        if sock.fileno() not in ready:
            continue
        data, files, _, _ = socket.recv_fds(sock, 16, 5)
        if not data:
            os._exit(0)
        try:
            pid = os.fork()
        except OSError as error:
            sock.sendall(_REPLY.pack(_FAILED, error.errno or 0, *_ASKED.unpack(data)))
        else:
            if pid == 0:
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                signal.signal(signal.SIGINT, signal.default_int_handler)
                sock.close()
                os.close(woken)
                os.close(wake)
                return list(files)
            _tell_start(sock, pid, *_ASKED.unpack(data))
        for file in files:
            os.close(file)


def _tell_start(sock: socket.socket, pid: int, number: int) -> None:
    pidfd = os.pidfd_open(pid)  # not reaped before the next look: it is this child's
    socket.send_fds(sock, [_REPLY.pack(_STARTED, pid, number)], [pidfd])
    os.close(pidfd)


def _tell_ends(sock: socket.socket) -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        sock.sendall(_REPLY.pack(_ENDED, pid, status))


def _become(files: list[int]) -> NoReturn:
    """Becomes, in a child, what `python -m` would be."""
    os.setsid()
    with os.fdopen(files[0], "rb") as file:
        spec = json.loads(file.read())
    os.fchdir(files[1])
    os.close(files[1])
    for number, given in enumerate(files[2:]):
        os.dup2(given, number)
        os.close(given)
    os.environ.clear()
    os.environ.update(spec["environment"])
    sys.argv = [spec["module"], *spec["arguments"]]
    _show(["torch-ecrec" if spec["module"] == "torch_ecrec" else spec["module"], *spec["arguments"]])
    runpy.run_module(spec["module"], run_name="__main__", alter_sys=True)
    sys.exit(0)


def _show(words: Sequence[str]) -> None:
    """Makes `ps` show a command line, in the place of the fork server's."""
    after = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    start, end = int(after[45]), int(after[46])  # `arg_start` and `arg_end` of proc(5), fields 48 and 49
    room = end - start
    if start and room > 0:
        ctypes.memmove(start, "\0".join(words).encode(errors="replace")[: room - 1].ljust(room, b"\0"), room)


def main() -> NoReturn:
    """Runs the fork server: `python -m torch_ecrec.processes.fork_server FILE PRELOAD ... ROOM`."""
    for number in (*SIGNALS, *TO_SCRIPTS, signal.SIGHUP):  # sent to all of a job: it ends when whoever asks is gone
        signal.signal(number, signal.SIG_IGN)
    sock = socket.socket(fileno=int(sys.argv[1]))
    sock.set_inheritable(False)
    _load(sys.argv[2:-1])
    for stream in (sys.stdout, sys.stderr):  # what a library has printed is not for the children to say again
        if stream is not None:
            stream.flush()
    freeze()
    try:
        files = _serve(sock)
    except ConnectionError:  # whoever asks is gone
        os._exit(0)
    _become(files)


if __name__ == "__main__":
    main()
