"""Makes all the trouble that `TroubledStore` can, and says as JSON what came of it. Its own mounts end with it.

python troubled_child.py FOLDER
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

from torch_ecrec.demo.troubled_store import TroubledStore

WRITE = """
import sys, time
begin = time.monotonic()
try:
    with open(sys.argv[1], "wb") as file:
        file.write(b"x" * 100_000)
    print("written")
except OSError as error:
    print(error.strerror)
"""


def write(name: Path) -> str:
    """What another process gets that writes there."""
    done = subprocess.run([sys.executable, "-c", WRITE, str(name)], capture_output=True, text=True, timeout=300)
    return done.stdout.strip()


def main() -> None:
    store = TroubledStore(Path(sys.argv[1]))
    said = {"left_out": store.left_out, "before": write(Path(store.url) / "before")}
    for kind in ("full-disk", "slow-store", "failing-store"):
        if kind in store.left_out:
            continue
        store.begin(kind)
        delayed, begin_s = store.delayed, time.monotonic()
        said[kind] = write(Path(store.url) / kind)
        said[f"{kind} delayed"] = store.delayed - delayed
        said[f"{kind} seconds"] = time.monotonic() - begin_s
        store.end()
        said[f"after {kind}"] = write(Path(store.url) / f"after-{kind}")
        store.end()  # there is none: nothing
    said["files"] = sorted(os.listdir(store.url))
    print(json.dumps(said))


if __name__ == "__main__":
    main()
