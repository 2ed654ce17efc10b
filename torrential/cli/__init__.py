"""The command line. Reads arguments and environment, and turns every error on purpose into one clear message."""

from __future__ import annotations

from torrential.cli.commands import app as app
from torrential.cli.entry import carry_out as carry_out
from torrential.cli.entry import main as main
