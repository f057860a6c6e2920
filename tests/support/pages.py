"""The pages of the documents' site, as mkdocs.yml has them."""

from pathlib import Path
from typing import Any

import yaml
from places import ROOT

DOCS = ROOT / "docs"


class _Loader(yaml.SafeLoader):
    """Reads the file without making what it names of Python (`!!python/object/apply:...`)."""


_Loader.add_multi_constructor("tag:yaml.org,2002:python/", lambda loader, suffix, node: suffix)


def navigation() -> dict[str, list[Path]]:
    """The pages of each section of the site, in their order; "Home" is one, too."""
    config = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), _Loader)
    return {title: _pages(inner) for one in config["nav"] for title, inner in one.items()}


def _pages(inner: Any) -> list[Path]:
    if isinstance(inner, str):
        return [DOCS / inner]
    return [page for one in inner for deeper in one.values() for page in _pages(deeper)]
