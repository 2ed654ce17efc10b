"""The live page as a browser shows it: what happens is seen, what a reader has chosen stays, nothing else runs."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from browser import Browser
from test_faults import Run
from test_report_browser import FIGURES, PAGE, SECTIONS
from test_watch import EVIL, address_in, append, begin, step

from torrential.records import Evaluation, Event
from torrential.reporting.serve import PageServer

pytestmark = pytest.mark.timeout(120)

Serve = Callable[[Path], PageServer]
STATES = "[...document.querySelectorAll('.state')].map((state) => state.textContent)"
NOTICE = "document.getElementById('connection')"


@pytest.fixture
def serving() -> Iterator[Serve]:
    threads: dict[PageServer, threading.Thread] = {}

    def serve(directory: Path) -> PageServer:
        server = PageServer(directory)
        threads[server] = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        threads[server].start()
        return server

    yield serve
    for server, thread in threads.items():
        server.shutdown()
        thread.join()
        server.server_close()


def evaluation(number: int, value: float) -> Evaluation:
    place = {"step": number, "epoch": 1, "samples": 20 * number, "time": number / 10}
    return Evaluation(split="validation", value=value, loss=0.1, **place)


def changes_asked_for(browser: Browser) -> int:
    browser.run("0")  # hears of requests until now
    return sum("/changes?" in url for url in browser.requests)


def test_a_worker_that_is_killed_is_seen_to_be_lost(tmp_path: Path) -> None:
    """By the second answer after its death is on record: a page asks twice a second."""
    args = ["digits", "--workers", "3", "--strategy", "ssp", "--epochs", "2000", "--set", "slow=2:3", "--watch"]
    run = Run(tmp_path / "run", *args, "--out", str(tmp_path / "run"))
    try:
        with Browser(tmp_path / "home") as browser:
            browser.open(address_in(tmp_path / "run.log", run.process))
            browser.until(f"String({STATES}) === 'training,training,training'")
            browser.until("document.querySelectorAll('#against-time .main-svg').length > 0")
            run.kill("tt-worker-1")
            run.until(lambda: run.events("worker_lost"), "the loss of a worker")
            before = changes_asked_for(browser)
            browser.until(f"String({STATES}) === 'training,lost,training'")
            assert changes_asked_for(browser) - before <= 2
            browser.until("document.querySelector('#now .events').textContent.includes('worker lost · worker 1')")
            browser.until("document.getElementById('workers').data.some((trace) => trace.name === 'worker lost')")
            run.end()  # and so does the server
            browser.until(f"!{NOTICE}.hidden && {NOTICE}.textContent.startsWith('No connection to the server since')")
            assert [error for error in browser.errors if "net::ERR" not in error] == []
    finally:
        run.end()


def test_a_run_grows_and_what_the_reader_has_chosen_stays(tmp_path: Path, serving: Serve) -> None:
    first = begin(tmp_path / "runs" / "a", [step(0, 1), step(1, 1), evaluation(1, 0.1), evaluation(5, 0.5)])
    server = serving(tmp_path / "runs")
    points = "document.getElementById('against-time').data[0].x.length"
    with Browser(tmp_path / "home") as browser:
        browser.open(server.address)
        browser.until(f"document.querySelector('#against-time .main-svg') && {points} === 2")
        assert browser.run("document.title") == "digits · Torrential"
        browser.run("window.same = document.getElementById('stale'); 0")
        browser.run("Plotly.relayout('against-time', {'xaxis.range': [0.2, 0.4]}).then(() => 0)")
        browser.click("#time [data-key=e0]")
        browser.until("document.querySelector('[data-key=e0]').getAttribute('aria-pressed') === 'false'")
        begin(tmp_path / "runs" / "b", [step(0, 1), evaluation(1, 0.2)], seed=1)
        browser.until("document.querySelectorAll('#trial option').length === 2")
        browser.run("trial.value = 't0'; trial.dispatchEvent(new Event('change'))")
        append(tmp_path / "runs" / "b", step(0, 2))
        append(first, evaluation(9, 0.7), Event(event="worker_joined", time=0.9, worker=1))
        browser.until("document.getElementById('against-time').data.some((trace) => trace.x.length === 3)")
        assert browser.run("document.getElementById('against-time').layout.xaxis.range") == [0.2, 0.4]
        visible = "[...new Set(document.getElementById('against-time').data.map((trace) => trace.visible))]"
        assert browser.run(visible) == [False]
        assert browser.run("document.querySelector('[data-key=e0]').getAttribute('aria-pressed')") == "false"
        assert browser.run("[trial.value, window.same === document.getElementById('stale')]") == ["t0", True]
        assert browser.errors == []


def test_a_notice_tells_of_a_server_that_ends_and_of_one_that_is_back(tmp_path: Path, serving: Serve) -> None:
    begin(tmp_path / "run", [step(0, 1)])
    server = serving(tmp_path / "run")
    with Browser(tmp_path / "home") as browser:
        browser.open(server.address)
        browser.until(f"{NOTICE}.hidden && {STATES}.length === 2")
        shutil.rmtree(tmp_path / "run")
        browser.until("document.getElementById('now').textContent.includes('is gone; it is shown again')")
        begin(tmp_path / "run", [step(0, 1), step(1, 1)])
        browser.until(f"{STATES}.length === 2")
        server.finish()
        browser.until(f"!{NOTICE}.hidden && {NOTICE}.textContent.startsWith('The run has ended')")
        assert browser.errors == []


def test_another_study_can_be_chosen(tmp_path: Path, serving: Serve) -> None:
    begin(tmp_path / "runs" / "a", [step(0, 1)])
    begin(tmp_path / "runs" / "b", [step(0, 1)], task="other", source="other")
    with Browser(tmp_path / "home") as browser:
        browser.open(serving(tmp_path / "runs").address)
        browser.until("document.querySelector('h1')?.textContent === 'other'")
        browser.run("view.value = 'task digits'; view.dispatchEvent(new Event('change', {bubbles: true}))")
        browser.until("document.querySelector('h1').textContent === 'digits' && view.value === 'task digits'")
        assert browser.errors == []


def test_on_a_dark_phone_nothing_is_wider_than_the_screen(tmp_path: Path, serving: Serve) -> None:
    run = begin(tmp_path / ("r" * 200), [step(0, 1), step(1, 1), evaluation(1, 0.1)], task="t" * 80, metric="m" * 80)
    append(run, Event(event="worker_lost", time=0.2, worker=1, detail="d" * 300))
    begin(tmp_path / "other", [step(0, 1)], task="u" * 200)
    with Browser(tmp_path / "home", width=390, height=844, dark=True) as browser:
        browser.open(serving(tmp_path).address)
        browser.until("document.querySelector('#view')")
        browser.run(f"view.value = 'task {'t' * 80}'; view.dispatchEvent(new Event('change', {{bubbles: true}}))")
        browser.until("document.querySelectorAll('#against-time .main-svg').length > 0")
        browser.until("[...document.querySelectorAll('.main-svg')].every((p) => p.clientWidth < 390)")
        assert browser.run(PAGE) == [390] * 3 and browser.run(SECTIONS) == [] and browser.run(FIGURES) == 0
        assert browser.run("getComputedStyle(document.body).backgroundColor") == "rgb(20, 23, 26)"
        assert browser.errors == []


def test_hostile_records_run_nothing(tmp_path: Path, serving: Serve) -> None:
    image = "<img src=x onerror=alert(1)>"
    for number, text in enumerate((EVIL, image, "</script><script>alert(1)</script>", "javascript:alert(1)")):
        name = text.replace("/", "")
        run = begin(tmp_path / "runs" / f"{number}{name}", [step(0, 1), evaluation(1, 0.5)], task=text, metric=text)
        append(run, Event(event=text, time=0.5, worker=0, detail=text))
    server = serving(tmp_path / "runs")
    with Browser(tmp_path / "home") as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source="window.alert = () => { window.evil = true }")
        browser.open(server.address)
        for text in (EVIL, image, "</script><script>alert(1)</script>"):
            browser.until("document.querySelectorAll('#view option').length === 4")
            number = browser.run(f"[...view.options].findIndex((option) => option.value === 'task ' + {text!r})")
            browser.run(f"view.selectedIndex = {number}; view.dispatchEvent(new Event('change', {{bubbles: true}}))")
            browser.until(f"document.querySelector('h1').textContent === {text!r}")
            browser.until("document.querySelectorAll('#workers .main-svg').length > 0")
        scripts = "document.querySelectorAll('#page script').length"
        assert browser.run(f"[typeof window.evil, document.images.length, {scripts}]") == ["undefined", 0, 0]
        assert browser.errors == []
        assert {url.split("?")[0] for url in browser.requests} == {server.address, f"{server.address}changes"}
