"""The live page: one file of HTML with its own style and script, and the policy that lets nothing else run in it."""

from __future__ import annotations

import base64
import functools
import hashlib
import re
from pathlib import Path

FILE = Path(__file__).with_name("page.html")


@functools.cache
def page() -> bytes:
    """Returns the live page: one file of HTML that loads nothing else."""
    return FILE.read_bytes()


@functools.cache
def policy() -> str:
    """Returns the page's Content-Security-Policy: its own script and style, by their hashes, and this server's data."""
    text = page().decode()
    allowed = {tag: [_hash(body) for body in re.findall(rf"<{tag}>(.*?)</{tag}>", text, re.DOTALL)] for tag in _TAGS}
    return "; ".join(
        [
            "default-src 'none'",
            f"script-src {' '.join(allowed['script'])}",
            f"style-src {' '.join(allowed['style'])}",
            "connect-src 'self'",
            "img-src data:",
            "base-uri 'none'",
            "form-action 'none'",
            "frame-ancestors 'none'",
            "require-trusted-types-for 'script'",  # text of the cluster cannot become HTML, whatever the script does
        ]
    )


_TAGS = ("script", "style")


def _hash(body: str) -> str:
    return f"'sha256-{base64.b64encode(hashlib.sha256(body.encode()).digest()).decode()}'"
