"""How both ends of a connection show that they know the run's secret, which never travels.

    listener    draws a challenge, which is a part of its address: `tcp:10.0.0.1:4711?9f2c…`
    caller   ── number, proof, greeting ──► listener      proof  = HMAC(secret, "caller", challenge, number, greeting)
    caller   ◄── answer ───────────────────              answer = HMAC(secret, "listener", challenge, number, greeting)

Callers hear of addresses from the supervisor, so no caller waits for a challenge to come: it may write at once, and
believes nothing that it reads before the answer. A number is good once, so a greeting that was recorded and is said
again is refused, here as at any other listener, which has another challenge. What is said afterwards is in clear,
unless all of it is in TLS (comm/tls.py).

The agents of other hosts know the address alone, and have no certificates yet. The listener tells them in clear the
challenge and whether TLS is spoken. If it is, both proofs name the listener's certificate as each side sees it (channel
binding): an attacker between the two has to show another certificate, and then neither side believes the other.

    listener ── enciphered or not, challenge ──► caller      in clear
    caller   ── TLS: no certificate is asked for ──► listener
    caller   ── number, proof, greeting ──► listener      challenge = what was said, and the certificate's SHA-256
"""

from __future__ import annotations

import hmac
import secrets
import struct
from typing import NamedTuple

SECRET_BYTES = 32
CHALLENGE_BYTES = NUMBER_BYTES = 16
PROOF_BYTES = 32
LENGTH = struct.Struct("<I")  # of the greeting
CLEAR, ENCIPHERED = b"\0", b"\1"  # what comes before a challenge that is said: whether TLS is spoken
HEAD_BYTES = NUMBER_BYTES + PROOF_BYTES + LENGTH.size  # what comes before the greeting
MAX_GREETING = 1 << 12  # bytes


class Opening(NamedTuple):
    """What a caller says first, and what the listener must answer."""

    words: bytes
    answer: bytes


def opening(secret: bytes, challenge: bytes, greeting: bytes) -> Opening:
    number = secrets.token_bytes(NUMBER_BYTES)
    proof = _proof(secret, b"caller", challenge, number, greeting)
    words = b"".join((number, proof, LENGTH.pack(len(greeting)), greeting))
    return Opening(words, _proof(secret, b"listener", challenge, number, greeting))


class Challenge:
    """A listener's challenge, and the numbers of those that have met it."""

    def __init__(self, secret: bytes, certificate: bytes = b"") -> None:
        """`certificate`: the digest of the listener's, if proofs are to name it."""
        self.words = secrets.token_bytes(CHALLENGE_BYTES)
        self._secret, self._named = secret, self.words + certificate
        self._used: set[bytes] = set()  # by callers that knew the secret, so strangers cannot make it grow

    def answer(self, head: bytes, greeting: bytes) -> bytes | None:
        """What the caller is answered; None if it does not know the secret, or says what was said before."""
        number, proof = head[:NUMBER_BYTES], head[NUMBER_BYTES : NUMBER_BYTES + PROOF_BYTES]
        right = hmac.compare_digest(proof, _proof(self._secret, b"caller", self._named, number, greeting))
        if not right or number in self._used:
            return None
        self._used.add(number)
        return _proof(self._secret, b"listener", self._named, number, greeting)


def _proof(secret: bytes, who: bytes, challenge: bytes, number: bytes, greeting: bytes) -> bytes:
    lengths = bytes([len(who), len(challenge)])  # so that no other parts make up the same words
    return hmac.digest(secret, b"".join((lengths, who, challenge, number, greeting)), "sha256")
