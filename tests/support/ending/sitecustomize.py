"""Lets processes of a test's cluster end at their start: every process that finds this on its path runs it first.

ECREC_TEST_END is "COMMAND HOW TIMES": the first TIMES processes of that command (serve, coordinator) end with exit code
HOW, or by that signal if it is negative, or hang. "room 0 N": nobody can write a byte to a file.
Counted in the folder of their standard error, the logs.
"""

import os
import resource
import sys
import time

if os.environ.get("ECREC_TEST_END"):
    command, how, times = os.environ["ECREC_TEST_END"].split()
    if command == "room":
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, 0))
    with open("/proc/self/cmdline", "rb") as file:  # sys.argv is not there yet
        arguments = file.read().split(b"\0")
    if command.encode() in arguments:
        folder = os.path.dirname(os.readlink(f"/proc/self/fd/{sys.stderr.fileno()}"))
        for number in range(int(times)):
            try:
                os.close(os.open(f"{folder}/ended.{number}", os.O_CREAT | os.O_EXCL))
            except FileExistsError:
                continue
            if how == "hang":
                time.sleep(1000)
            if int(how) < 0:
                os.kill(os.getpid(), -int(how))
            os._exit(int(how))
