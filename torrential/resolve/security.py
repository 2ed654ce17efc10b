"""Whether what protects a run's connections fits together."""

from __future__ import annotations

import importlib.util
import os

import msgspec

from torrential.comm.certificates import CertificateFiles, read_identity
from torrential.config import LocalSettings
from torrential.errors import BadInput
from torrential.strategies.base import Strategy
from torrential.strategies.ddp import Ddp

FILES = ("certificate", "key", "authority")


def check_security(settings: LocalSettings, strategy: Strategy) -> tuple[LocalSettings, list[str]]:
    """The settings with whole paths, and what to say of security=tls where it does nothing."""
    given = {name: path for name in FILES if (path := getattr(settings, name)) is not None}
    if settings.security == "token":
        if given:
            name, path = next(iter(given.items()))
            raise BadInput(f"{name}={path} is for security=tls (given: security=token); add --set security=tls")
        return settings, []
    if isinstance(strategy, Ddp) or settings.algorithm in ("native", "nccl"):
        which = "ddp" if isinstance(strategy, Ddp) else f"algorithm={settings.algorithm}"
        raise BadInput(f"{which} sends by torch's libraries, in clear (given: security=tls); leave out one of the two")
    if given:
        missing = [name for name in FILES if name not in given]
        if missing:
            raise BadInput(
                f"certificate, key and authority go together (given: {', '.join(given)}; missing: "
                f"{', '.join(missing)}); give all three, or none to have them made"
            )
        files = CertificateFiles(**{name: os.path.abspath(os.path.expanduser(path)) for name, path in given.items()})
        read_identity(files)
        settings = msgspec.structs.replace(settings, **files._asdict())
    elif importlib.util.find_spec("cryptography") is None:
        raise BadInput(
            "security=tls makes certificates with the package cryptography, which is not installed; "
            "pip install 'torrential[tls]', or give certificate, key and authority"
        )
    if settings.transport == "tcp":
        return settings, []
    return settings, [
        f"security=tls has no effect: nothing leaves this host's memory and Unix sockets "
        f"(transport={settings.transport}); add --set transport=tcp"
    ]
