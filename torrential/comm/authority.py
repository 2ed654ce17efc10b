"""An authority that lives as long as a run, and signs certificates for the run's processes alone.

The package cryptography makes them: it is the well-kept one, where openssl as a command would put keys into files.
"""

from __future__ import annotations

from datetime import UTC, datetime

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat

from torrential.comm.tls import Identity

EVER_SINCE = datetime(2000, 1, 1, tzinfo=UTC)  # hosts' clocks may differ, and the run's end ends it all
FOREVER = datetime(9999, 12, 31, 23, 59, 59, tzinfo=UTC)  # "no well-defined expiration date" (RFC 5280, 4.1.2.5)


class Authority:
    """Signs the certificates of a run. Its key never leaves this object, so nothing else can sign them."""

    def __init__(self, name: str = "torrential run") -> None:
        self._name, self._key = _named(name), generate_private_key(SECP256R1())
        self.certificate = self._sign(self._name, self._key, FOREVER, authority=True).public_bytes(Encoding.PEM)

    def identity(self, name: str, until: datetime = FOREVER) -> Identity:
        """A new key, and a certificate for it."""
        key = generate_private_key(SECP256R1())
        certificate = self._sign(_named(name), key, until)
        pem = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
        return Identity(certificate.public_bytes(Encoding.PEM), pem, self.certificate)

    def _sign(
        self, name: x509.Name, key: EllipticCurvePrivateKey, until: datetime, authority: bool = False
    ) -> x509.Certificate:
        builder = x509.CertificateBuilder(self._name, name, key.public_key(), x509.random_serial_number())
        builder = builder.not_valid_before(EVER_SINCE).not_valid_after(until)
        limits = x509.BasicConstraints(ca=authority, path_length=0 if authority else None)
        return builder.add_extension(limits, critical=True).sign(self._key, SHA256())


def _named(name: str) -> x509.Name:
    return x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
