"""`python -m torch_ecrec`, and where the console script `torch-ecrec` begins: see `cli`."""

import sys

from torch_ecrec.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
