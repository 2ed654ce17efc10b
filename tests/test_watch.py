"""The live page without a browser: who gets an answer, what it says, and that no listener stays."""

from __future__ import annotations

import contextlib
import html
import http.client
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import msgspec
import pytest
from command import Command
from made_up import Unseen, config, fake, history, manifest, question

from torrential.errors import BadInput
from torrential.records import RECORDS, Event, Record, Step, encode, write_manifest
from torrential.reporting import live, page, serve
from torrential.reporting.live import LivePage
from torrential.reporting.serve import PageServer
from torrential.study.conduct import conduct
from torrential.study.directory import open_directory

Cli = Callable[..., subprocess.CompletedProcess[str]]
EVIL = "<script>alert(1)</script>"


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page, "plotly_script", lambda: "")  # five megabytes
    monkeypatch.setattr(live, "LEAST_SECONDS", 0.0)
    monkeypatch.setattr(live, "REST", 0.0)


def begin(place: Path, records: list[Record], **different: Any) -> Path:
    """A run that goes on."""
    place.mkdir(parents=True)
    write_manifest(place, manifest(config(**{"metric": "accuracy", "changed": {}, "strategy": "ssp", **different})))
    append(place, *records)
    return place


def append(place: Path, *records: Record) -> None:
    with open(place / RECORDS, "ab") as file:
        file.writelines(encode(record) + b"\n" for record in records)


def step(worker: int, number: int, **different: Any) -> Step:
    given = {"step": number, "epoch": 1, "samples": 20 * number, "loss": 0.5, "time": number / 10, "compute": 0.06}
    given |= {"communicate": 0.03, "wait": 0.01, "bytes_sent": 1000 * number, "staleness": {0: number, 2: 1}}
    return Step(worker=worker, **given | different)


def ask(live_page: LivePage, view: str = "", shown: str = "", version: int = 0) -> dict[str, Any]:
    return dict(json.loads(live_page.changes(view, shown, version)))


def words(text: str) -> str:
    return " ".join(re.sub(r"<[^>]+>", " ", text).split())


def workers(text: str) -> list[str]:
    return [words(row) for row in re.findall(r"<tr>(?:(?!</tr>).)*class=\"state.*?</tr>", text)]


# -- what the page shows ----------------------------------------------------------------------------------------------
def test_a_page_is_told_what_has_changed_and_nothing_else(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", [step(0, 1), step(1, 1)])
    live_page = LivePage(run)
    first = ask(live_page)
    assert first["view"] == "all" and not first["last"] and not first["behind"]
    assert sorted(first["figures"]) == ["stale", "time-spent"] and sorted(first["timelines"]) == ["t0"]
    again = ask(live_page, shown="all", version=first["version"])
    assert "html" not in again and again["figures"] == again["timelines"] == {} and again["version"] == first["version"]
    append(run, Event(event="worker_lost", time=0.3, worker=1))
    lost = ask(live_page, shown="all", version=first["version"])
    assert lost["figures"] == {} and sorted(lost["timelines"]) == ["t0"]
    assert "0.30 s · worker lost · worker 1" in lost["html"]
    assert ask(live_page, shown="all", version=first["version"]) == lost  # another page has not seen it either
    assert ask(live_page, shown="other", version=lost["version"])["figures"] == first["figures"]


def test_workers_are_what_their_records_say(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", [], workers=4)
    live_page = LivePage(run)

    def states(*records: Record) -> list[str]:
        append(run, *records)
        return [row.split()[1] for row in workers(ask(live_page)["html"])]

    assert states() == ["starting"] * 4
    assert states(step(0, 1), step(2, 1)) == ["training", "starting", "training", "starting"]
    assert states(Event(event="worker_hung", time=0.2, worker=2)) == ["training", "starting", "hung", "starting"]
    assert states(Event(event="worker_lost", time=0.2, worker=2), step(2, 2))[2] == "lost"
    assert states(Event(event="worker_joined", time=0.3, worker=2))[2] == "training"
    assert states(Event(event="worker_lost", time=0.4, worker=0))[0] == "lost"
    assert states(Event(event="resumed", time=5.0)) == ["starting"] * 4
    assert states(step(0, 60)) == ["training", "starting", "starting", "starting"]
    assert workers(ask(live_page)["html"])[0] == "0 training 60 0.5000 60 / 30 / 10 0.03279, at most 2 60 kB 6.0"
    assert "4 workers: 3 starting, 1 training" in words(ask(live_page)["html"])


def test_a_run_that_ends_or_falls_silent_says_so(tmp_path: Path) -> None:
    of = config("ssp", metric="accuracy")
    run = begin(tmp_path / "run", history(of, 5.0)[:-1])
    live_page = LivePage(run)
    assert "1 run: 1 going on" in (going_on := words(ask(live_page)["html"]))
    assert (
        "5.000 s · step 200 · epoch 4 of 10 · 4,000 samples · 800 samples a second · accuracy 91 % (target 90 %)"
        in (going_on)
    )
    assert '<progress value="0.4"' in ask(live_page)["html"]
    past = time.time() - 200
    os.utime(run / RECORDS, (past, past))
    silent = ask(live_page)["html"]
    assert "silent, no record for 3 min" in words(silent) and "2 workers: 2 silent" in words(silent)
    append(run, history(of, 5.0)[-1])
    ended = ask(live_page)["html"]
    assert "1 run: 1 ended" in words(ended) and "2 workers: 2 finished" in words(ended)
    assert '<progress value="1.0"' in ended


def test_a_run_may_begin_later_and_its_directory_may_vanish(tmp_path: Path) -> None:
    live_page = LivePage(tmp_path / "runs")
    (tmp_path / "runs").mkdir()
    assert "there is no run in" in (nothing := ask(live_page))["html"] and nothing["figures"] == {}
    run = begin(tmp_path / "runs" / "first", [step(0, 1)])
    assert "first" in (there := ask(live_page, shown="all"))["html"] and there["view"] == "task digits"
    shutil.rmtree(tmp_path / "runs")
    assert f"{tmp_path}/runs is gone; it is shown again when it is back" in ask(live_page)["html"]
    begin(run, [step(0, 1), step(0, 2)])
    assert sorted(ask(live_page)["figures"]) == ["stale", "time-spent"]


def test_a_run_that_is_resumed_is_shown_from_where_it_goes_on(tmp_path: Path) -> None:
    run = begin(tmp_path / "run", [step(0, number) for number in range(1, 90)])
    live_page = LivePage(run)
    assert "step 89 " in words(ask(live_page)["html"])
    (run / RECORDS).unlink()
    append(run, *(step(0, number) for number in range(1, 40)), Event(event="resumed", time=3.9, step=39))
    assert "step 39 " in words(ask(live_page)["html"]) and "resumed · step 39" in ask(live_page)["html"]


def test_damaged_runs_are_named(tmp_path: Path) -> None:
    run = begin(tmp_path / "good", [step(0, 1)])
    (run / RECORDS).write_bytes(b"{\n" + (run / RECORDS).read_bytes())
    (begin(tmp_path / "bad", [step(0, 1)]) / "manifest.json").write_text("{")
    said = words(ask(LivePage(tmp_path))["html"])
    assert "good: 1 damaged lines of its records are left out" in said and "bad/manifest.json is damaged" in said


def test_a_directory_of_studies_and_runs_shows_the_newest_and_offers_the_others(tmp_path: Path) -> None:
    what = question()
    open_directory(tmp_path / "study", what)
    conduct(what, tmp_path / "study", fake, Unseen())
    os.utime(tmp_path / "study" / "runs", (1000, 1000))
    begin(tmp_path / "a", [step(0, 1)])
    begin(tmp_path / "b", [step(0, 1)], task="other", source="other")
    past = time.time() - 50
    os.utime(tmp_path / "a" / "manifest.json", (past, past))
    live_page = LivePage(tmp_path)
    text = (newest := ask(live_page))["html"]
    assert newest["view"] == "task other" and "<h1>other</h1>" in text
    offered = re.findall(r'<option id="view-\d" value="([^"]+)">([^<]+)<', text)
    assert offered == [("task digits", "digits (1 run)"), ("task other", "other (1 run)"), ("study study", "study")]
    study = ask(live_page, view="study study", shown="task other", version=newest["version"])
    assert study["view"] == "study study" and "Verdict so far" in study["html"] and len(study["timelines"]) == 6
    assert "6 runs: 6 ended" in study["html"]
    begin(tmp_path / "c", [step(0, 1)])
    assert ask(live_page)["view"] == "task digits" and "digits (2 runs)" in ask(live_page, view="task other")["html"]
    assert ask(LivePage(tmp_path, "digits"))["view"] == "task digits"


def test_trials_keep_their_numbers_when_others_come_between(tmp_path: Path) -> None:
    begin(tmp_path / "a", [step(0, 1)], seed=1)
    begin(tmp_path / "z", [step(0, 1)], seed=2, strategy="bsp")
    live_page = LivePage(tmp_path)
    found = ask(live_page)
    begin(tmp_path / "b", [step(0, 1)], seed=3)
    more = ask(live_page, shown=found["view"], version=found["version"])
    assert sorted(more["timelines"]) == ["t2"]
    assert re.findall(r'value="(t\d)"[^>]*>(\w)<', more["html"]) == [("t0", "a"), ("t2", "b"), ("t1", "z")]


def test_text_from_records_stays_text(tmp_path: Path) -> None:
    run = begin(tmp_path / f"a{EVIL.replace('/', '')}", [step(0, 1)], task=EVIL, metric=EVIL)
    append(run, Event(event=EVIL, time=1.0, worker=0, detail=EVIL), Event(event="worker_lost", time=1.0, worker=0))
    for directory in (tmp_path, run):
        found = ask(LivePage(directory))
        assert "<script" not in found["html"] and "&lt;script&gt;alert(1)" in found["html"]
        assert "<script" not in msgspec.json.encode(found["timelines"]).decode()


def test_hundreds_of_runs_are_read_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(200):
        begin(tmp_path / f"run-{number:03}", [step(0, i) for i in range(1, 20)], seed=number)
    live_page, drawn = LivePage(tmp_path), list[str]()
    original = live.timeline
    monkeypatch.setattr(live, "timeline", lambda run, *how: (drawn.append(run.directory.name), original(run, *how))[1])
    first = ask(live_page)
    assert len(first["timelines"]) == len(drawn) == 200
    append(tmp_path / "run-007", step(0, 30))
    assert sorted(ask(live_page, shown=first["view"], version=first["version"])["timelines"]) == ["t7"]
    assert drawn[200:] == ["run-007"]


# -- who gets an answer -----------------------------------------------------------------------------------------------
@pytest.fixture
def server(tmp_path: Path) -> Iterator[PageServer]:
    begin(tmp_path / "run", [step(0, 1)])
    with PageServer(tmp_path) as found:
        thread = threading.Thread(target=found.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def get(server: PageServer, path: str, host: str | None = None, method: str = "GET") -> tuple[int, dict[str, str], str]:
    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
    connection.putrequest(method, path, skip_host=True)
    connection.putheader("Host", host or f"127.0.0.1:{server.server_port}")
    connection.endheaders()
    with contextlib.closing(connection), connection.getresponse() as answer:
        return answer.status, dict(answer.getheaders()), answer.read().decode()


def token(server: PageServer) -> str:
    return urlsplit(server.address).path.strip("/")


def test_the_address_leads_to_the_page_and_its_changes(server: PageServer) -> None:
    assert re.fullmatch(rf"http://127\.0\.0\.1:{server.server_port}/[\w-]{{32}}/", server.address)
    status, headers, text = get(server, f"/{token(server)}/")
    assert status == 200 and headers["Content-Type"] == "text/html; charset=utf-8"
    assert headers["Cache-Control"] == "no-store" and headers["Referrer-Policy"] == "no-referrer"
    policy = re.search(r'http-equiv="Content-Security-Policy" content="([^"]+)"', text)
    assert policy and {"default-src 'none'", " connect-src 'self'"} <= set(html.unescape(policy[1]).split(";"))
    assert not re.search(r"(src|href)=\"?(https?:|//)", text)
    status, headers, text = get(server, f"/{token(server)}/changes?view=&shown=&version=0")
    assert status == 200 and headers["Content-Type"] == "application/json; charset=utf-8"
    assert json.loads(text)["view"] == "task digits"


@pytest.mark.parametrize("query", ["version=x", "version=-1", "version=" + "9" * 5000, "view=%ff&shown=%00", "&&=;%"])
def test_any_question_is_answered(server: PageServer, query: str) -> None:
    status, _, text = get(server, f"/{token(server)}/changes?{query}")
    assert status == 200 and "html" in json.loads(text)


def test_nothing_else_is_there(server: PageServer) -> None:
    ours = token(server)
    paths = ["/", "//", "/changes", "/favicon.ico", f"/{ours[:-1]}/", f"/{ours}x/", f"/{ours.swapcase()}/", "/%E9/"]
    paths += [f"/{ours}/run", f"/{ours}/run/records.jsonl", f"/{ours}/../run/manifest.json", f"/{ours}/changes/", "*"]
    for path in paths:
        status, _, text = get(server, path)
        assert (status, text) == (404, "there is no such page\n"), path
    assert get(server, f"/{ours}/", method="POST")[0] == 501


@pytest.mark.parametrize("host", ["evil.example", "evil.example:{port}", "127.0.0.1", "127.0.0.1:1", "0.0.0.0:{port}"])
def test_other_names_of_this_address_are_refused(server: PageServer, host: str) -> None:
    for path in (f"/{token(server)}/", f"/{token(server)}/changes", "/"):
        status, _, text = get(server, path, host.format(port=server.server_port))
        assert (status, text) == (403, "not an address of this server\n")
    assert get(server, f"/{token(server)}/changes", f"localhost:{server.server_port}")[0] == 200


def connected(server: PageServer, count: int) -> list[socket.socket]:
    return [socket.create_connection(("127.0.0.1", server.server_port), 20) for _ in range(count)]


def test_those_who_say_nothing_make_room(server: PageServer) -> None:
    idle = connected(server, serve.MOST_CALLERS + 8)
    assert get(server, f"/{token(server)}/changes")[0] == 200
    assert idle[0].recv(1) == b""  # that came first
    idle[-1].sendall(f"GET /{token(server)}/ HTTP/1.0\r\nHost: localhost:{server.server_port}\r\n\r\n".encode())
    assert idle[-1].recv(15) == b"HTTP/1.0 200 OK"
    for each in idle:
        each.close()


def test_nobody_stays_by_saying_a_byte_now_and_then(server: PageServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(serve, "CALL_SECONDS", 0.2)
    (slow,) = connected(server, 1)
    with contextlib.suppress(ConnectionError), slow:
        for byte in b"GET / HTTP/1.0\r\nX: " + b"y" * 100_000:
            slow.sendall(bytes([byte]))
            time.sleep(0.01)
        pytest.fail("it was never dropped")


def test_a_port_can_be_used_again_at_once(tmp_path: Path) -> None:
    port = 0
    for _ in range(3):
        with PageServer(tmp_path, port=port) as server:
            port = server.server_port
            thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
            thread.start()
            assert get(server, "/")[0] == 404
            server.shutdown()
            thread.join()


def test_it_listens_on_loopback_alone(server: PageServer) -> None:
    assert server.socket.getsockname()[0] == "127.0.0.1"


# -- commands ---------------------------------------------------------------------------------------------------------
def test_bad_ports_and_directories_are_refused(server: PageServer, tmp_path: Path, run_cli: Cli) -> None:
    taken = server.server_port
    with pytest.raises(BadInput, match=f"cannot listen on port {taken} .*; choose another --port, or leave it out"):
        PageServer(tmp_path, port=taken)
    with pytest.raises(BadInput, match="there is no port 65536; give --port a number from 1 to 65535"):
        serve.check_port(65536)
    done = run_cli("watch", tmp_path / "nowhere")
    assert done.returncode == 2 and f"there is no directory {tmp_path}/nowhere; name a study" in done.stderr
    done = run_cli("train", "digits", "--port", 8000)
    assert done.returncode == 2 and "--port 8000 is the port of the live page; give --watch as well" in done.stderr
    done = run_cli("train", "digits", "--watch", "--port", taken, "--out", tmp_path / "new")
    assert done.returncode == 2 and f"cannot listen on port {taken}" in done.stderr
    assert not (tmp_path / "new").exists()


def address_in(file: Path, process: Command) -> str:
    deadline = time.monotonic() + 40
    while not (found := re.search(r"http://127\.0\.0\.1:\d+/[\w-]{32}/", file.read_text() if file.exists() else "")):
        assert process.poll() is None and time.monotonic() < deadline, file.read_text()
        time.sleep(0.01)
    return found[0]


def is_listening(address: str) -> bool:
    try:
        socket.create_connection(("127.0.0.1", urlsplit(address).port or 0), 5).close()
    except ConnectionRefusedError:
        return False
    return True


@pytest.mark.parametrize(
    ("number", "code", "said"), [("SIGINT", 0, "stopped\n"), ("SIGTERM", 143, ""), ("SIGHUP", 129, "")]
)
def test_watch_ends_when_it_is_told_to(tmp_path: Path, number: str, code: int, said: str) -> None:
    begin(tmp_path / "runs" / "run", [step(0, 1)])
    out, err = tmp_path / "out", tmp_path / "err"
    process = Command(["watch", str(tmp_path / "runs")], out, err)
    address = address_in(out, process)
    assert is_listening(address) and out.read_text() == f"{address} (Ctrl-C ends it)\n"
    children = [int(pid) for pid in Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()]
    for pid in children if number == "SIGHUP" else [process.pid]:  # a terminal tells all of them
        os.kill(pid, signal.Signals[number])
    assert process.wait(30) == code and err.read_text() == said
    assert not is_listening(address)


def test_train_serves_its_page_until_the_run_ends(tmp_path: Path) -> None:
    err = tmp_path / "err"
    args = ["train", "digits-mlp", "--workers", "2", "--epochs", "1000", "--out", str(tmp_path / "run"), "--watch"]
    process = Command(args, tmp_path / "out", err)
    address = address_in(err, process)
    with contextlib.closing(http.client.HTTPConnection(urlsplit(address).netloc, timeout=40)) as connection:
        connection.request("GET", f"{urlsplit(address).path}changes")
        assert json.loads(connection.getresponse().read())["view"] == "all"
    os.kill(process.pid, signal.SIGINT)
    assert process.wait(40) == 130, err.read_text()
    assert not is_listening(address)


def test_the_page_of_a_command_that_is_killed_ends_with_it(tmp_path: Path) -> None:
    err = tmp_path / "err"
    args = ["train", "digits-mlp", "--epochs", "1000", "--out", str(tmp_path / "run"), "--watch"]
    process = Command(args, tmp_path / "out", err)
    address = address_in(err, process)
    process.kill()
    process.wait(30)
    deadline = time.monotonic() + 20
    while is_listening(address):
        assert time.monotonic() < deadline
        time.sleep(0.01)
