"""A machine and a user with as little as there may be: no browser, no cache, no home directory."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import browser
import pytest

from torrential import cache
from torrential.cache import cache_directory
from torrential.comm import costs
from torrential.data import find as finding
from torrential.errors import BadInput

ROOT = Path(__file__).parents[1]
NEEDED = ("bash", "env", "flock", "tail", "chmod", "sleep")  # of scripts/browser, and of the apt-get below

APT = """#!/bin/bash
echo "$*" >>$0.log
[[ $* == *update* ]] && { : >$0.updated; exit; }
%s
printf '#!/bin/bash\\n' >${0%%/*}/chromium
chmod +x ${0%%/*}/chromium
"""
OLD_LISTS = '[[ -e $0.updated ]] || { echo "E: Unable to locate package chromium"; exit 100; }'
OFFLINE = 'echo "W: no network"; echo "E: Unable to fetch"; exit 100'


class Fresh:
    """A directory of programs, which is all that scripts/browser finds there; what apt-get was asked is in its log."""

    def __init__(self, place: Path) -> None:
        self.place = place
        for name in NEEDED:
            found = next(path for path in (Path("/usr/bin", name), Path("/bin", name)) if path.exists())
            (place / name).symlink_to(found)

    def add(self, name: str, content: str) -> None:
        (self.place / name).write_text(content)
        (self.place / name).chmod(0o755)

    def start(self) -> subprocess.Popen[str]:
        script = str(ROOT / "scripts" / "browser")
        return subprocess.Popen(
            [script], env={"PATH": str(self.place)}, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )

    def run(self) -> list[str]:
        """The lines it says, but for that it waits for the tests beside this one: the lock is the machine's."""
        said, _ = (process := self.start()).communicate(timeout=30)
        assert process.returncode == 0, said
        return [line for line in said.splitlines() if "another setup is installing" not in line]

    def asked(self) -> list[str]:
        log = self.place / "apt-get.log"
        words = [line.split() for line in log.read_text().splitlines()] if log.exists() else []
        return ["update" if "update" in line else f"install {line[-1]}" for line in words]


@pytest.fixture
def fresh(tmp_path: Path) -> Fresh:
    return Fresh(tmp_path)


def user(uid: int) -> str:
    return f"#!/bin/bash\necho {uid}\n"


def test_root_gets_a_browser_once(fresh: Fresh) -> None:
    fresh.add("id", user(0))
    fresh.add("apt-get", APT % "")
    assert fresh.run() == ["browser: installing chromium, for the tests of pages", "browser: ready"]
    assert fresh.run() == [] and fresh.asked() == ["install chromium"]


def test_lists_of_packages_are_fetched_where_they_are_missing(fresh: Fresh) -> None:
    fresh.add("id", user(0))
    fresh.add("apt-get", APT % OLD_LISTS)
    assert fresh.run()[-1] == "browser: ready"
    assert fresh.asked() == ["install chromium", "update", "install chromium"]


def test_two_at_once_install_once(fresh: Fresh) -> None:
    fresh.add("id", user(0))
    fresh.add("apt-get", APT % "sleep 0.3")
    both = [fresh.start(), fresh.start()]
    said = [process.communicate(timeout=30)[0] for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    assert fresh.asked() == ["install chromium"]


def test_where_apt_has_none_it_says_why(fresh: Fresh) -> None:
    fresh.add("id", user(0))
    fresh.add("apt-get", APT % OFFLINE)
    assert fresh.run()[1:] == [
        "browser: apt-get cannot install chromium (E: Unable to fetch); install chromium or google-chrome, the tests "
        "of pages are skipped without"
    ]


def test_others_are_told_what_to_install(fresh: Fresh) -> None:
    fresh.add("id", user(1000))
    fresh.add("apt-get", APT % "")
    assert fresh.run() == [
        "browser: there is none, and only root may install one; install chromium or google-chrome, the tests of pages "
        "are skipped without"
    ]
    assert fresh.asked() == []


PYTHON = """#!/bin/bash
[[ $* == -V ]] && { echo Python %s; exit; }
echo "$*" >>%s
[[ $* == "-m venv .venv" ]] && { mkdir -p .venv/bin; cp "$0" .venv/bin/python; }
exit 0
"""


def test_a_ready_environment_is_kept_whichever_python3_is_on_the_path(tmp_path: Path) -> None:
    """Found by a user: another python3 came first on the path, and .venv was discarded and installed again."""
    place, log = tmp_path / "project", tmp_path / "log"
    (place / "scripts").mkdir(parents=True)
    (place / "constraints.txt").write_text("torch==2\n")
    (place / "pyproject.toml").touch()
    shutil.copy(ROOT / "scripts" / "setup", place / "scripts")

    def setup(version: str) -> list[str]:
        """What any Python was asked by a setup where python3 is of this version."""
        (tmp_path / "python3").write_text(PYTHON % (version, log))
        (tmp_path / "python3").chmod(0o755)
        log.write_text("")
        subprocess.run([place / "scripts" / "setup"], env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, check=True, timeout=30)
        return [line for line in log.read_text().splitlines() if "-m " in line]

    made = setup("3.12.1")
    assert made[0] == "-m venv .venv" and sum("pip" in line for line in made) == 2
    assert setup("3.11.7") == []
    (place / "constraints.txt").write_text("torch==3\n")
    assert ["venv" in line for line in setup("3.11.7")] == [False, False]  # into the same environment
    (place / ".venv" / "bin" / "python").unlink()
    assert setup("3.11.7")[0] == "-m venv .venv"


@pytest.mark.parametrize(("ci", "ends"), [("", pytest.skip.Exception), ("true", pytest.fail.Exception)])
def test_without_a_browser_pages_are_not_tested_and_ci_fails(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, ci: str, ends: type[BaseException]
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("CI", ci)
    with pytest.raises(ends, match="there is no browser to test pages with; install chromium or google-chrome"):
        browser.Browser(tmp_path / "home")


# -- a user without a home directory ----------------------------------------------------------------------------------
@pytest.fixture
def homeless(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Neither HOME nor a line in the password file, as in a container with --user; gives the current directory."""
    for variable in ("HOME", "XDG_CACHE_HOME"):
        monkeypatch.delenv(variable, raising=False)
    monkeypatch.setattr(cache.os, "getuid", lambda: 2**31 - 7)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_nothing_is_kept_for_a_user_without_a_home(homeless: Path) -> None:
    assert cache_directory() is None
    costs.remember(costs.fitted([costs.Sample(costs.ADD, 1, 8, 1e-6)], "unix", 4, ""))
    assert costs.load(costs.cache_path("unix", 4)) is None
    assert list(homeless.iterdir()) == []  # no directory named ~


def test_a_download_without_a_home_wants_a_place(homeless: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(finding, "_SYSTEM", homeless)
    things = finding.Source("things", {"a.gz": ""}, ("file:///nowhere/",), "apt-get install dataset-things")
    with pytest.raises(BadInput, match=r"no home directory to download it to; apt-get .* with --data-dir DIR"):
        finding.find(things)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ({"HOME": "/a"}, "/a/.cache/torrential"),
        ({"HOME": "/a", "XDG_CACHE_HOME": "/b"}, "/b/torrential"),
        ({"HOME": "/a", "XDG_CACHE_HOME": "b"}, "/a/.cache/torrential"),
        ({"HOME": "a"}, None),
    ],
)
def test_where_the_cache_is(
    homeless: Path, monkeypatch: pytest.MonkeyPatch, given: dict[str, str], expected: str | None
) -> None:
    for name, value in given.items():
        monkeypatch.setenv(name, value)
    assert cache_directory() == (None if expected is None else Path(expected))


def test_training_needs_no_home(run_cli: Callable[..., subprocess.CompletedProcess[str]], tmp_path: Path) -> None:
    nowhere = str(tmp_path / "file" / "home")  # below a file, so that nobody can make it
    (tmp_path / "file").touch()
    done = run_cli(
        *("train", "digits", "--steps", "3", "--workers", "2", "--set", "transport=unix", "--out", tmp_path / "run"),
        env={"HOME": nowhere, "XDG_CACHE_HOME": nowhere},
    )
    assert done.returncode == 0, done.stderr
    assert os.path.exists(tmp_path / "run" / "records.jsonl")
