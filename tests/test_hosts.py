"""Roles on different hosts: letters, clocks and lost cables, on the test bed of hosts.py."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hosts import APART_SECONDS, NETWORK, Host, cluster, needs_root

pytestmark = needs_root

LOOK = """
import json, os, socket, time
print(json.dumps([socket.gethostname(), time.monotonic(), sorted(os.listdir("/tmp")), os.listdir("/dev/shm"),
                  sorted(int(name) for name in os.listdir("/proc") if name.isdigit())]))
"""
TALK = """
import os, sys, time
from pathlib import Path
import torch
from torrential.comm.channel import TensorLetter
from torrential.comm.post import Contact, Post

number, address, shared = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
post = Post(number, 0, f"tcp:{address}:0", b"s" * 32, TensorLetter)
beside = shared / f".{number}"
beside.write_text(post.where)
beside.rename(shared / str(number))
while not (shared / str(1 - number)).exists():
    time.sleep(0.01)
post.know({1 - number: Contact((shared / str(1 - number)).read_text(), 0)})
post.post(1 - number, TensorLetter(1, "hello"), [torch.full((300_000,), float(number))])
letter = post.receive(20)
print(letter.source, letter.message.name, letter.tensors[0].sum().item(), post.strangers, flush=True)
if number:
    sys.stdin.readline()  # its cable is out
    post.know({0: Contact(f"tcp:{address.rpartition('.')[0]}.99:9?" + "00" * 16, 1)})
    print(post.post(0, TensorLetter(1, "nobody hears"), [torch.ones(9)]).done(), flush=True)
post.close()
os._exit(0)  # as roles do, whatever their threads are at
"""


def python(host: Host, program: str, *words: object, **options: object) -> subprocess.Popen[str]:
    return host.run(sys.executable, "-c", program, *words, stdout=subprocess.PIPE, **options)


def said(process: subprocess.Popen[str], words: str | None = None) -> str:
    out, _ = process.communicate(words, timeout=50)
    assert process.returncode == 0, out
    return out.strip()


def test_hosts_share_nothing_but_a_directory_and_leave_nothing(tmp_path: Path) -> None:
    seen = sorted({path.parts[2] for path in (tmp_path, Path.cwd()) if path.is_relative_to("/tmp")})
    with cluster(2, tmp_path) as hosts:
        for number, host in enumerate(hosts):
            name, clock, files, memory, pids = json.loads(said(python(host, LOOK)))
            assert (name, sorted(files), memory) == (f"host{number}", seen, [])
            assert (number + 1) * APART_SECONDS < clock < (number + 2) * APART_SECONDS
            assert len(pids) <= 3 and max(pids) < 50  # nobody else's
        sleeping = hosts[0].run("sleep", 1000)
        while hosts[0].processes() != ["sleep"]:
            assert sleeping.poll() is None
        hosts[0].kill()
        sleeping.wait(10)
        assert hosts[0].processes() == []
        hosts[1].limit(8_000_000)
        shown = hosts[1].run("tc", "qdisc", "show", "dev", "eth0", stdout=subprocess.PIPE)
        assert "rate 8Mbit" in said(shown)


@pytest.mark.parametrize("hosts_each", [1, 2])
def test_letters_between_hosts(tmp_path: Path, hosts_each: int) -> None:
    """Two roles on one host that is not this one, or on two; a call that is lost holds up nobody."""
    with cluster(hosts_each, tmp_path) as hosts:
        places = [hosts[0], hosts[-1]]
        roles = [
            python(host, TALK, number, host.address, tmp_path, stdin=subprocess.PIPE)
            for number, host in enumerate(places)
        ]
        assert said(roles[0]) == "1 hello 300000.0 0"
        assert roles[1].stdout is not None
        assert roles[1].stdout.readline() == "0 hello 0.0 0\n"
        hosts[-1].disconnect()
        assert said(roles[1], "\n") == "False"
        assert all(host.address.startswith(NETWORK) for host in hosts)
