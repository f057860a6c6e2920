"""What a member says on a connection to another one before anything else, for tests that are a stranger."""

import socket

from torch_ecrec.protocol.build import own_build
from torch_ecrec.transport.acceptor import CHALLENGE, HELLO
from torch_ecrec.transport.frames import MAGIC
from torch_ecrec.transport.secret import CALLER, LISTENER, NONCE_BYTES, data_key, proof
from torch_ecrec.transport.sockets import SocketTransport

NONCE = bytes(range(NONCE_BYTES))
KEPT: list[socket.socket] = []  # connections that nobody reads: they would end with the last word of them


def hello_of(caller: bytes = b"a", build: bytes | None = None) -> bytes:
    """A hello, as the member of that name says it."""
    return HELLO.pack(MAGIC, NONCE, build or own_build().digest, caller)


def answer_to(challenge: bytes, hello: bytes, transport: SocketTransport, key: bytes | None = None) -> bytes:
    """The proof that is shown upon a challenge. `key`: if not the right one."""
    _, theirs, _ = CHALLENGE.unpack(challenge)
    shared = data_key(transport.secret, transport._address.key if key is None else key)
    return proof(shared, CALLER, NONCE, theirs, hello)


def read_exactly(sock: socket.socket, size: int) -> bytes:
    """So many bytes, or fewer if the connection ends."""
    got = b""
    while len(got) < size and (part := sock.recv(size - len(got))):
        got += part
    return got


def answer_hello(sock: socket.socket, transport: SocketTransport) -> socket.socket:
    """Answers who says hello as that transport does; returns the connection, which nobody reads from now on."""
    _, theirs, _, _ = HELLO.unpack(read_exactly(sock, HELLO.size))
    shared = data_key(transport.secret, transport._address.key)
    sock.sendall(CHALLENGE.pack(MAGIC, NONCE, proof(shared, LISTENER, theirs, NONCE)))
    KEPT.append(sock)
    return sock


def greet(sock: socket.socket, transport: SocketTransport, hello: bytes, key: bytes | None = None) -> None:
    """Goes through all of it with a transport that listens; no word of it if it hangs up."""
    sock.sendall(hello)
    challenge = read_exactly(sock, CHALLENGE.size)
    if len(challenge) == CHALLENGE.size:
        sock.sendall(answer_to(challenge, hello, transport, key))
