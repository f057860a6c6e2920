"""The cluster's shared secret: both sides of a connection prove that they know it before they talk.

Both sides draw a *nonce*, a random word that is used once, and say the HMAC of both with what they share (SHA-256,
RFC 2104). So neither says the secret, and nothing that was said before proves anything. What is shared on the control
channel is the cluster's secret (`TORCH_ECREC_SECRET`); on the data plane the secret and the key of who listens, which
the coordinator has told members only.

It keeps out who does not know the secret. It is no protection against who can change what is under way, or reads it:
what follows is neither signed nor encrypted.
"""

from __future__ import annotations

import hmac
import secrets

from torch_ecrec.errors import ClusterUnavailable
from torch_ecrec.runtime.addresses import is_loopback
from torch_ecrec.spec.settings import own_secret

NONCE_BYTES = PROOF_BYTES = 32
CALLER, LISTENER = b"caller", b"listener"


class NotProved(ClusterUnavailable):
    """The peer does not know this process's secret, or asks for one that this process does not have."""


def draw() -> bytes:
    """Returns a random nonce of `NONCE_BYTES` bytes."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(shared: bytes, side: bytes, callers: bytes, listeners: bytes, said: bytes = b"") -> bytes:
    """Returns the HMAC that proves knowledge of `shared`.

    Args:
        side: `CALLER` or `LISTENER`: who shows it.
        callers, listeners: the nonces of the two sides.
        said: what else of who shows it is to be as it was said.
    """
    return hmac.digest(shared, b"torch_ecrec 1 %s %b%b%b" % (side, callers, listeners, said), "sha256")


def is_proof(said: bytes, shared: bytes, side: bytes, callers: bytes, listeners: bytes, more: bytes = b"") -> bool:
    """Returns whether `said` is that proof, in constant time."""
    return hmac.compare_digest(said, proof(shared, side, callers, listeners, more))


def data_key(secret: bytes, key: bytes) -> bytes:
    """Returns the key that two members share on the data plane. `key`: the listener's."""
    return hmac.digest(secret, key, "sha256")


def secret_at(host: str) -> bytes:
    """Returns the secret that peers of a listener at `host` must know; b"" if none is needed, on loopback.

    Raises:
        ClusterUnavailable: other hosts get there, and there is no secret.
    """
    secret = own_secret()
    if not secret and not is_loopback(host):
        raise ClusterUnavailable(why_open(host))
    return secret


def why_open(host: str) -> str:
    """Returns an error message: why nobody may listen at that host without a secret, and what to do."""
    return (
        f"whoever reaches {host} could stop this cluster, or join it: other hosts take a secret. Set"
        " TORCH_ECREC_SECRET, or TORCH_ECREC_SECRET_FILE, to the same 16 characters or more for the coordinator, all"
        " servers and all trainers (`openssl rand -hex 32` makes one)"
    )
