"""What the processes of a run show to one another: nothing, the user's certificate, or one that the run makes."""

from __future__ import annotations

from collections.abc import Callable

from torrential.comm.certificates import CertificateFiles, read_identity
from torrential.comm.tls import Identity
from torrential.config import LocalSettings

Identities = Callable[[str], Identity | None]
"""What a process shows, by the name of its role."""


def nothing_to_show(name: str) -> None:
    """Of a run whose connections are in clear."""


def identities(settings: LocalSettings) -> Identities:
    if settings.security == "token":
        return nothing_to_show
    if settings.certificate and settings.key and settings.authority:
        given = read_identity(CertificateFiles(settings.certificate, settings.key, settings.authority))
        return lambda name: given
    from torrential.comm.authority import Authority  # needs the package cryptography

    return Authority().identity
