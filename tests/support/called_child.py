"""A process in which a function of a test's module is called. Run: python called_child.py ORDERS NUMBER

ORDERS is a JSON list: the module's file, the function's name, where modules are, and what it is called with after
NUMBER. It ends with 1 if that raises, and shows where.
"""

import importlib
import json
import sys
from pathlib import Path


def main() -> None:
    file, name, where, words = json.loads(sys.argv[1])
    sys.path += [str(Path(file).parent), *where]
    getattr(importlib.import_module(Path(file).stem), name)(int(sys.argv[2]), *words)


if __name__ == "__main__":
    main()
