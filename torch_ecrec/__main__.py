"""`python -m torch_ecrec`, and where the console script `torch-ecrec` begins: see `cli`."""

import sys

try:
    from torch_ecrec.cli.main import main
except ModuleNotFoundError as lacking:  # what every command needs: then not even `torch-ecrec doctor` can begin
    if (lacking.name or "torch_ecrec").partition(".")[0] == "torch_ecrec":
        raise
    sys.exit(f"torch-ecrec: {lacking.name} is not installed; this brings it: python -m pip install {lacking.name}")

if __name__ == "__main__":
    sys.exit(main())
