"""Run as a module: does what its first argument says, for tests of what starts processes."""

import atexit
import json
import os
import sys
import time


def main() -> None:
    what = sys.argv[1]
    if what == "tell":
        told = {
            "argv": sys.argv[1:],
            "environment": dict(os.environ),
            "folder": os.getcwd(),
            "session": os.getsid(0) == os.getpid(),
            "files": sorted(int(file) for file in os.listdir("/proc/self/fd")),
            "threads": len(os.listdir("/proc/self/task")),
            "module": __name__,
            "loaded": sorted(name for name in sys.modules if name in ("wave", "forked_child")),
        }
        print(json.dumps(told))
    elif what == "exit":
        atexit.register(print, "in order", flush=True)
        sys.exit(int(sys.argv[2]))
    elif what == "fail":
        raise ValueError("as it was told")
    elif what == "hold":
        time.sleep(600)
    elif what == "wait":
        print("begun", flush=True)
        sys.stdin.read()
        print("read to the end", file=sys.stderr)


if __name__ == "__main__":
    main()
