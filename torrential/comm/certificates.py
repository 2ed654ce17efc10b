"""Certificates that a user gives: read from files, and tried before anything relies on them."""

from __future__ import annotations

import os
import ssl
from typing import NamedTuple

from torrential.comm.tls import Identity, Tls
from torrential.errors import BadInput
from torrential.files import read_regular

LARGEST = 1 << 20  # bytes of a file


class CertificateFiles(NamedTuple):
    """The paths of PEM files."""

    certificate: str
    key: str
    authority: str


def read_identity(files: CertificateFiles) -> Identity:
    """The contents of the files, tried once: a peer that shows the same certificate is admitted."""
    identity = Identity(*(_content(option, path) for option, path in files._asdict().items()))
    try:
        Tls(identity).try_itself()
    except ssl.SSLCertVerificationError as error:
        raise BadInput(
            f"certificate {files.certificate} is not accepted by authority {files.authority} "
            f"({error.verify_message}); give the authority that has signed it, and a certificate that is valid"
        ) from error
    except (ssl.SSLError, ValueError) as error:
        why = getattr(error, "reason", None) or str(error)
        raise BadInput(
            f"certificate {files.certificate}, key {files.key} and authority {files.authority} do not make a "
            f"certificate to show ({why}); give PEM files, and the certificate's own key without a password"
        ) from error
    return identity


def _content(option: str, path: str) -> bytes:
    try:
        return read_regular(os.path.expanduser(path), LARGEST)
    except OSError as error:
        raise BadInput(f"{option}={path} cannot be read: {error.strerror}; give a PEM file") from error
