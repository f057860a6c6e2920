"""Metadata of the distribution `torch-ecrec`; the tools' settings are in pyproject.toml.

Two things need saying.

TorchRec is not in `install_requires`: its metadata asks for the CUDA build of FBGEMM, which overwrites the CPU build in
the same folder. On a CPU it goes in afterwards with `pip install --no-deps -r requirements/torch-2.13/torchrec.txt`, as
`make setup` does. The extra `gpu` can name it, since there the metadata is right.

The top-level folder `examples` is installed as the package `torch_ecrec.examples`, so that the demo of an installed
wheel finds the script that it trains; in an editable install it stays where it is, beside the package.
"""

import re
from pathlib import Path

from setuptools import find_packages, setup

ROOT = Path(__file__).resolve().parent
README = ROOT / "README.md"


def version() -> str:
    """The one place is `__version__` in torch_ecrec/__init__.py; read, not imported: nothing is installed yet."""
    source = (ROOT / "torch_ecrec" / "__init__.py").read_text(encoding="utf-8")
    found = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if found is None:
        raise SystemExit('torch_ecrec/__init__.py has no line `__version__ = "..."`')
    return found[1]


setup(
    name="torch-ecrec",
    version=version(),
    description="Erasure-coded fault tolerance for TorchRec embeddings: kill any r servers, lose not one bit",
    long_description=README.read_text(encoding="utf-8") if README.exists() else "",
    long_description_content_type="text/markdown",
    license="Apache-2.0",
    license_files=["LICENSE"],
    classifiers=[
        "Development Status :: 3 - Alpha",
        "Intended Audience :: Science/Research",
        "Operating System :: POSIX :: Linux",
        "Programming Language :: Python :: 3 :: Only",
        "Programming Language :: Python :: 3.11",
        "Programming Language :: Python :: 3.12",
        "Programming Language :: Python :: 3.13",
        "Topic :: Scientific/Engineering :: Artificial Intelligence",
    ],
    python_requires=">=3.11",
    packages=[*find_packages(include=["torch_ecrec", "torch_ecrec.*"]), "torch_ecrec.examples"],
    package_dir={"torch_ecrec": "torch_ecrec", "torch_ecrec.examples": "examples"},
    package_data={
        "torch_ecrec": ["py.typed"],
        "torch_ecrec.experiments": ["specs/*.toml"],
        "torch_ecrec.web": ["page.html"],
    },
    include_package_data=False,
    zip_safe=False,
    install_requires=[
        # Two releases are tested. FBGEMM's extension loads under one each: the extras have what belongs together.
        "torch>=2.13.0,<2.15",
        "numpy>=2",
        "numba>=0.61",
        "msgspec>=0.19",
        # Checkpoints: where they are kept, hashes of blocks, compression.
        "fsspec",
        "xxhash>=3",
        "zstandard>=0.22",
        # What TorchRec 1.8.0 and 1.9.2 need besides FBGEMM.
        "tensordict",
        "torchmetrics==1.0.3",
        "pyre-extensions",
        "tqdm",
        "iopath",
    ],
    extras_require={
        "cpu": ["torch==2.13.0", "fbgemm-gpu-cpu==1.8.0"],
        "gpu": ["torch==2.13.0", "fbgemm-gpu==1.8.0", "torchrec==1.8.0"],
        "cpu-torch214": ["torch==2.14.1", "fbgemm-gpu-cpu==1.9.0"],
        "gpu-torch214": ["torch==2.14.1", "fbgemm-gpu==1.9.0", "torchrec==1.9.2"],
        "demo": ["matplotlib", "psutil"],
        "s3": ["s3fs"],
        "etcd": ["etcd3gw"],
        "tensorboard": ["tensorboard"],
        "completion": ["shtab"],
        "http": ["aiohttp>=3.11", "prometheus_client>=0.22"],
        "site": ["mkdocs>=1.6,<2", "mkdocs-material>=9.6,<10", "mkdocstrings-python>=2"],
        "dev": [
            "galois>=0.4.4",
            "hypothesis",
            "mypy",
            "py-spy",
            "pytest",
            "pytest-timeout",
            "pytest-xdist",
            "ruff",
        ],
    },
    entry_points={"console_scripts": ["torch-ecrec = torch_ecrec.__main__:main"]},
)
