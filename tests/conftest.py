"""Every test must leave the machine as it found it: no process, shared memory, private directory or socket behind."""

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import command
import psutil
import pytest

from torrential import launching, run
from torrential.worlds.local.warm import Warm

GRACE_SECONDS = 3.0
SEMAPHORE = "sem.mp-"  # of a pool of Python's, which may be another test's: its resource tracker removes them

# Every process started from here inherits this, so that it is known as ours even when its parent is gone.
MARK = "TORRENTIAL_TESTS", uuid.uuid4().hex

# A shell has what it starts in the background ignore Ctrl-C, which every process started from here would inherit.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


@dataclass(frozen=True)
class Machine:
    """What a test could leave behind. Each is a set, so that leftovers are a plain difference."""

    pids: frozenset[int]
    files: frozenset[str]
    sockets: frozenset[str]

    @classmethod
    def look(cls) -> "Machine":
        return cls(
            pids=frozenset(int(name) for name in os.listdir("/proc") if name.isdigit()),
            files=frozenset(
                [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if not name.startswith(SEMAPHORE)]
                + [f"/tmp/{name}" for name in os.listdir("/tmp") if name.startswith("torrential")]
            ),
            sockets=frozenset(listening_abstract_sockets(Path("/proc/net/unix").read_text())),
        )


def listening_abstract_sockets(table: str) -> Iterator[str]:
    """Those of /proc/net/unix with our name in theirs that this process holds; others' end with their processes.

    Columns: Num RefCount Protocol Flags Type St Inode Path; abstract paths begin with @; Flags is 00010000
    (__SO_ACCEPTCON) while listening.
    """
    for line in table.splitlines()[1:]:
        columns = line.split(maxsplit=7)
        path = columns[7] if len(columns) == 8 else ""
        listening = path.startswith("@") and "torrential" in path and int(columns[3], 16) & 0x10000
        if listening and f"socket:[{columns[6]}]" in _own_descriptors():
            yield path


def _own_descriptors() -> set[str]:
    found = set()
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            found.add(os.readlink(f"/proc/self/fd/{name}"))
    return found


def processes_left(since: Machine) -> Iterator[tuple[psutil.Process, str]]:
    """Processes of ours that were not there before, each with words that name it."""
    me = psutil.Process()
    adopters = {1} | {parent.pid for parent in me.parents()}  # whoever a process goes to when its parent dies
    children = {child.pid for child in me.children(recursive=True)}
    for pid in sorted(Machine.look().pids - since.pids - {me.pid}):
        try:
            process = psutil.Process(pid)
            with process.oneshot():
                parent, command, state = process.ppid(), " ".join(process.cmdline()), process.status()
            if parent == me.pid and "multiprocessing.resource_tracker" in command:
                continue  # Python's own, one for the life of this interpreter
            orphan = parent in adopters and "torrential.worlds" in command
            if pid in children or orphan or is_marked(process):
                yield process, f"process {pid} ({state}, child of {parent}): {command or process.name()}"
        except psutil.NoSuchProcess:
            continue  # gone meanwhile; a zombie counts as gone


def is_marked(process: psutil.Process) -> bool:
    try:
        return process.environ().get(MARK[0]) == MARK[1]
    except (psutil.AccessDenied, psutil.ZombieProcess, OSError):
        return False


def things_left(since: Machine) -> dict[object, str]:
    """What is new since then: something that identifies it, and words that name it."""
    now = Machine.look()
    left: dict[object, str] = {name: f"file {name}" for name in now.files - since.files}
    left |= {name: f"listening socket {name}" for name in now.sockets - since.sockets}
    if now.pids - since.pids:
        left |= {process: words for process, words in processes_left(since)}
    return left


told: set[object] = set()  # each leftover fails one test, not its module as well


def assert_nothing_left(since: Machine, grace_seconds: float = GRACE_SECONDS) -> None:
    """Wait out the grace, then fail naming what is left. What comes and goes meanwhile belongs to somebody else."""
    deadline = time.monotonic() + grace_seconds
    left = {thing: words for thing, words in things_left(since).items() if thing not in told}
    while left and time.monotonic() < deadline:
        time.sleep(0.02)
        now = things_left(since)
        left = {thing: now[thing] for thing in left if thing in now}
    if left:
        told.update(left)
        kill_ours(since)  # so that one failure does not trouble the tests after it
        pytest.fail("left behind:\n  " + "\n  ".join(sorted(left.values())), pytrace=False)


def kill_ours(since: Machine) -> None:
    children = set(psutil.Process().children(recursive=True))
    for process, _ in processes_left(since):
        if process in children or is_marked(process):
            kill(process)


@pytest.fixture(scope="session", autouse=True)
def mark() -> Iterator[None]:
    os.environ[MARK[0]] = MARK[1]
    yield
    del os.environ[MARK[0]]


@pytest.fixture(scope="session", autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What tests measure of this machine stays out of the user's cache."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


@pytest.fixture(scope="session", autouse=True)
def warm(mark: None, own_cache: None) -> Iterator[None]:
    """Processes of runs that tests start with tt.train come from one that has torch loaded, and so do commands."""
    source = Warm()
    command.prepare()
    with pytest.MonkeyPatch.context() as patch:
        for module in (run, launching):
            patch.setattr(module, "Launch", source.launch)
        yield
    source.close()


@pytest.fixture(scope="module", autouse=True)
def nothing_left_by_module(warm: None) -> Iterator[None]:
    """For what fixtures that live longer than one test start."""
    before = Machine.look()
    yield
    assert_nothing_left(before)


@pytest.fixture(autouse=True)
def nothing_left_by_test(mark: None) -> Iterator[None]:
    before = Machine.look()
    yield
    assert_nothing_left(before)


@pytest.fixture
def run_cli(tmp_path: Path) -> Callable[..., subprocess.CompletedProcess[str]]:
    """`run_cli("train", "digits", timeout=60, env={...})` runs the command line in a process of its own, and
    `run_cli(script=path)` a Python file.

    `env` is added to ours. When time is up the whole tree of processes is killed and the test fails with the output.
    """

    def run(
        *args: object, timeout: float = 60, env: dict[str, str] | None = None, script: Path | None = None
    ) -> subprocess.CompletedProcess[str]:
        words, name = [str(arg) for arg in args], uuid.uuid4().hex
        streams = [tmp_path / f"{name}.{stream}" for stream in ("out", "err")]
        process = command.Command(words, *streams, env=env, script=script)
        try:
            process.wait(timeout)
        except BaseException as error:  # the test's own time may be up, too
            kill_tree(process.pid)
            process.wait()
            if not isinstance(error, subprocess.TimeoutExpired):
                raise
        out, err = (stream.read_text() if stream.exists() else "" for stream in streams)
        if process.wait() == -signal.SIGKILL:
            pytest.fail(f"{words} took over {timeout} s\nstdout:\n{out}\nstderr:\n{err}", pytrace=False)
        return subprocess.CompletedProcess(words, process.wait(), out, err)

    return run


def kill_tree(pid: int) -> None:
    try:
        root = psutil.Process(pid)
        tree = [root, *root.children(recursive=True)]
    except psutil.NoSuchProcess:
        return
    for process in tree:
        kill(process)


def kill(process: psutil.Process) -> None:
    with contextlib.suppress(psutil.NoSuchProcess):
        process.kill()
