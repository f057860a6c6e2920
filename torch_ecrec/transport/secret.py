"""Who may speak with this cluster: who knows its secret, shown to each other on every connection.

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
    """Who is there does not know the secret that this process has, or wants one that it has not."""


def draw() -> bytes:
    """Returns a nonce."""
    return secrets.token_bytes(NONCE_BYTES)


def proof(shared: bytes, side: bytes, callers: bytes, listeners: bytes, said: bytes = b"") -> bytes:
    """Returns what shows that one knows `shared`.

    Args:
        side: `CALLER` or `LISTENER`: who shows it.
        callers, listeners: the nonces of the two sides.
        said: what else of who shows it is to be as it was said.
    """
    return hmac.digest(shared, b"torch_ecrec 1 %s %b%b%b" % (side, callers, listeners, said), "sha256")


def is_proof(said: bytes, shared: bytes, side: bytes, callers: bytes, listeners: bytes, more: bytes = b"") -> bool:
    """Whether `said` is that proof. Takes the same time whatever it is."""
    return hmac.compare_digest(said, proof(shared, side, callers, listeners, more))


def data_key(secret: bytes, key: bytes) -> bytes:
    """Returns what two members share on the data plane. `key`: of who listens."""
    return hmac.digest(secret, key, "sha256")


def secret_at(host: str) -> bytes:
    """Returns what who connects must know, for a process that listens at `host`; b"": nothing, on loopback.

    Raises:
        ClusterUnavailable: other hosts get there, and there is no secret.
    """
    secret = own_secret()
    if not secret and not is_loopback(host):
        raise ClusterUnavailable(why_open(host))
    return secret


def why_open(host: str) -> str:
    """Returns why nobody listens at that host without a secret, and what to do."""
    return (
        f"whoever reaches {host} could stop this cluster, or join it: other hosts take a secret. Set"
        " TORCH_ECREC_SECRET, or TORCH_ECREC_SECRET_FILE, to the same 16 characters or more for the coordinator, all"
        " servers and all trainers (`openssl rand -hex 32` makes one)"
    )
