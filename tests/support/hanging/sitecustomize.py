"""A store that hangs, for processes that find this on their path: URLs `hanging:///FOLDER`.

Whoever lists, reads or looks there while the file ECREC_TEST_HANGS is there waits until it is gone. Before that, a line
is written to it: somebody hangs.
"""

import os
import time

if os.environ.get("ECREC_TEST_HANGS"):
    import fsspec
    from fsspec.implementations.local import LocalFileSystem

    def wait() -> None:
        path = os.environ["ECREC_TEST_HANGS"]
        if os.path.exists(path):
            with open(path, "a") as file:
                file.write("hangs\n")
        while os.path.exists(path):
            time.sleep(0.05)

    class HangingFileSystem(LocalFileSystem):
        """See above."""

        protocol = "hanging"

        @classmethod
        def _strip_protocol(cls, path):  # type: ignore[no-untyped-def]
            return super()._strip_protocol(str(path).removeprefix("hanging://"))

        def ls(self, path, detail=False, **more):  # type: ignore[no-untyped-def]
            wait()
            return super().ls(path, detail, **more)

        def info(self, path, **more):  # type: ignore[no-untyped-def]
            wait()
            return super().info(path, **more)

    fsspec.register_implementation("hanging", HangingFileSystem)
