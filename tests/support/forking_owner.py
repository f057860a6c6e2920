"""Run as a module: has a process forked as its first argument says, tells its pid and the fork server's, and waits."""

import json
import os
import sys
import time

from torch_ecrec.processes.fork_server import ForkServer


def main() -> None:
    what, log = sys.argv[1:]
    environment = dict(os.environ)
    server = ForkServer((), environment)
    with open(log, "ab") as file:
        child = server.start("forked_child", (what,), environment, stdout=file.fileno(), stderr=file.fileno())
    assert server._process is not None
    print(json.dumps([child.pid, server._process.pid]), flush=True)
    if what == "fail":
        child.wait(60.0)
        return
    time.sleep(600)


if __name__ == "__main__":
    main()
