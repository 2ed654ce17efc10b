"""Runs in TLS: the same numbers, the same deaths; and what is said of settings that do not fit."""

import sys
from pathlib import Path

import pytest
import torch
from authority import EXPIRED, written
from test_faults import Run

import torrential as tt
from torrential.comm.authority import Authority
from torrential.config import LocalSettings
from torrential.errors import BadInput
from torrential.resolve.security import check_security

OURS = Authority("ours")


@pytest.mark.timeout(180)
@pytest.mark.parametrize(("strategy", "given"), [("allreduce", True), ("bsp", False)])
def test_runs_in_tls_end_in_the_bytes_of_those_in_clear(strategy: str, given: bool, tmp_path: Path) -> None:
    files = written(OURS.identity("everybody"), tmp_path / "files") if given else {}
    ends = []
    for security in ({"security": "token"}, {"security": "tls", **files}):
        options = {"algorithm": "ring"} if strategy == "allreduce" else {}
        run = tt.train(
            "digits-mlp",
            strategy,
            workers=2,
            steps=4,
            transport="tcp",
            progress=False,
            out=tmp_path / security["security"],
            **options,
            **security,
        )
        ends.append(run.model.state_dict())
        assert not any(b"PRIVATE" in file.read_bytes() for file in run.out.rglob("*") if file.is_file())
    assert ends[0].keys() == ends[1].keys()
    assert all(torch.equal(ends[0][name], ends[1][name]) for name in ends[0])


@pytest.mark.timeout(240)
def test_a_worker_and_a_server_are_killed_and_replaced_in_tls(tmp_path: Path) -> None:
    options = ("transport=tcp", "security=tls", "restart=true", "slow=0:3,1:3")
    words = [word for option in options for word in ("--set", option)]
    run = Run(tmp_path / "run", "digits", "--strategy", "ssp", "--workers", "2", "--servers", "2", "--epochs", "40",
              "--out", str(tmp_path / "run"), *words)  # fmt: skip
    try:
        run.until_training(5)
        run.kill("tt-worker-1")
        run.until(lambda: run.events("worker_joined"), "a worker that joins")
        run.kill("tt-server-0")
        run.until(lambda: run.events("server_joined"), "a server that joins")
        before = run.steps()
        run.until_training(before + 5)
        assert run.process.poll() is None
    finally:
        run.end()


def refused(strategy: tt.Strategy | None = None, **settings: str) -> str:
    with pytest.raises(BadInput) as caught:
        check_security(LocalSettings(**settings), strategy or tt.AllReduce())  # type: ignore[arg-type]
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_settings_that_do_not_fit_are_refused_in_one_line(tmp_path: Path) -> None:
    ours = written(OURS.identity("everybody"), tmp_path / "ours")
    other = written(Authority("another").identity("stranger"), tmp_path / "other")
    late = written(OURS.identity("late", EXPIRED), tmp_path / "late")
    clear = "certificate=a is for security=tls (given: security=token); add --set security=tls"
    assert refused(certificate="a", key="b") == clear
    tls = {"security": "tls", "transport": "tcp"}
    assert "(given: key; missing: certificate, authority); give all three" in refused(**tls, key=ours["key"])
    assert "key=/none/such cannot be read: No such file" in refused(**{**tls, **ours, "key": "/none/such"})
    assert "is not accepted by authority" in refused(**{**tls, **ours, "authority": other["authority"]})
    assert "certificate has expired" in refused(**tls, **late)
    assert "KEY_VALUES_MISMATCH" in refused(**{**tls, **ours, "key": other["key"]})
    assert "do not make a certificate to show" in refused(**{**tls, **ours, "certificate": ours["key"]})
    (tmp_path / "empty").touch()
    assert "do not make a certificate to show" in refused(**{**tls, **ours, "authority": str(tmp_path / "empty")})
    assert refused(tt.Ddp(), **tls).startswith("ddp sends by torch's libraries, in clear (given: security=tls)")
    assert refused(**tls, algorithm="native").startswith("algorithm=native sends by torch's libraries, in clear")


def test_keys_with_a_password_are_not_asked_for_it(tmp_path: Path) -> None:
    from cryptography.hazmat.primitives.serialization import (
        BestAvailableEncryption,
        Encoding,
        PrivateFormat,
        load_pem_private_key,
    )  # fmt: skip

    identity = OURS.identity("everybody")
    key = load_pem_private_key(identity.key, None)
    locked = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, BestAvailableEncryption(b"open"))
    files = written(identity, tmp_path / "files")
    Path(files["key"]).write_bytes(locked)
    assert "the key is protected by a password" in refused(security="tls", **files)


def test_relative_paths_are_kept_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that goes on may be in another directory."""
    written(OURS.identity("everybody"), tmp_path / "files")
    monkeypatch.chdir(tmp_path)
    given = {name: f"files/{name}.pem" for name in ("certificate", "key", "authority")}
    settings, said = check_security(LocalSettings(security="tls", transport="tcp", **given), tt.AllReduce())
    assert settings.key == str(tmp_path / "files/key.pem") and said == []


@pytest.mark.parametrize("transport", ["shared", "unix"])
def test_where_nothing_goes_over_tcp_a_line_says_so(transport: str) -> None:
    _, said = check_security(LocalSettings(security="tls", transport=transport), tt.AllReduce())  # type: ignore[arg-type]
    assert len(said) == 1 and said[0].startswith("security=tls has no effect") and transport in said[0]


def test_without_the_package_for_certificates_the_line_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography", None)
    assert "pip install 'torrential[tls]'" in refused(security="tls", transport="tcp")
