"""A run that is asked for, checked before anything is started."""

from __future__ import annotations

from torrential.resolve.machine import choose_device as choose_device
from torrential.resolve.machine import cluster_table as cluster_table
from torrential.resolve.request import ResolvedRun as ResolvedRun
from torrential.resolve.request import RunRequest as RunRequest
from torrential.resolve.run import resolve as resolve
from torrential.resolve.settings import split_options as split_options
