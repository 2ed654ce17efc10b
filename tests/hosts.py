"""Hosts on this machine for tests (benchmarks/hosts.py)."""

import os

import pytest

from benchmarks.hosts import APART_SECONDS as APART_SECONDS
from benchmarks.hosts import NETWORK as NETWORK
from benchmarks.hosts import Host as Host
from benchmarks.hosts import cluster as cluster

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can make hosts out of namespaces")
