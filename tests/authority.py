"""Certificates for tests: of authorities that are known or foreign, in time or expired."""

from datetime import UTC, datetime
from pathlib import Path

from torrential.comm.authority import Authority
from torrential.comm.tls import Identity, Tls

EXPIRED = datetime(2001, 1, 1, tzinfo=UTC)


def written(identity: Identity, directory: Path) -> dict[str, str]:
    """The paths of an identity's files, as options of a run."""
    directory.mkdir(exist_ok=True)
    paths = {name: directory / f"{name}.pem" for name in identity.__struct_fields__}
    for name, path in paths.items():
        path.write_bytes(getattr(identity, name))
    return {name: str(path) for name, path in paths.items()}


def expired(ours: Authority) -> Tls:
    """Shows a certificate whose time is over."""
    return Tls(ours.identity("late", EXPIRED))


def foreign(ours: Authority) -> Tls:
    """Knows an authority, and shows a certificate of another."""
    other = Authority("another run").identity("stranger")
    return Tls(Identity(other.certificate, other.key, ours.certificate))
