"""The report as a browser shows it: nothing goes wrong, nothing leaves the page, and what can be pressed works."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from browser import Browser
from studies import full_study, make_entry, make_study
from test_report import EVERYTHING, hostile_study

from torrential.reporting.page import write_report
from torrential.study.results import Study

DRAWN = "document.documentElement.dataset.drawn === 'true'"


def make(study: Study, place: Path) -> Path:
    write_report(study, place / "report.html")
    return place / "report.html"


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    """One page for the tests that leave it as they found it."""
    place = tmp_path_factory.mktemp("report")
    with Browser(place / "home") as browser:
        browser.open(make(full_study(), place))
        browser.until(DRAWN)
        yield browser


def test_it_opens_without_an_error_or_a_request(wide: Browser) -> None:
    assert wide.errors == []
    assert [url.rpartition("/")[2] for url in wide.requests] == ["report.html"]
    assert wide.run("[...document.querySelectorAll('main > section')].map((section) => section.id)") == EVERYTHING
    drawn = "[...document.querySelectorAll('.figure')].map((place) => place.querySelectorAll('.main-svg').length > 0)"
    assert wide.run(drawn) == [True] * 8


def test_the_page_could_not_fetch_or_run_anything_else(wide: Browser) -> None:
    """What its policy refuses is asked for here; the tests' own scripts come from outside the page and are exempt."""
    refused = (
        "new Promise((done) => { const image = new Image(); image.onerror = () => done('refused'); image.src = %s })"
    )
    assert wide.run(refused % "'http://127.0.0.1:9/x.png'") == "refused"
    wide.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 1'}))")
    assert wide.run("typeof window.ran") == "undefined"
    said = [error for error in wide.errors if "Content Security Policy" in error]
    assert len(said) == len(wide.errors) == 2
    wide.errors.clear()
    wide.requests[:] = [url for url in wide.requests if not url.startswith("http")]  # named, and blocked before it left


def shown(key: str) -> str:
    of_key = f"trace.meta === '{key}' && trace.visible !== false"
    return f"['against-time', 'stale'].map((id) => document.getElementById(id).data.filter((trace) => {of_key}).length)"


def test_a_legend_hides_and_shows_an_entry_everywhere(wide: Browser) -> None:
    pressed = "[...document.querySelectorAll('[data-key=e3]')].map((button) => button.getAttribute('aria-pressed'))"
    assert wide.run(shown("e3")) == [5, 1] and wide.run(pressed) == ["true"] * 3  # band, three trials, mean
    wide.click("#samples [data-key=e3]")
    wide.until(f"String({shown('e3')}) === '0,0'")
    assert wide.run(pressed) == ["false"] * 3 and wide.run(shown("e0")) == [5, 0]
    wide.click("#staleness [data-key=e3]")
    wide.until(f"String({shown('e3')}) === '5,1'")
    assert wide.errors == []


def test_another_trial_can_be_chosen(wide: Browser) -> None:
    events = (
        "[...document.querySelectorAll('.events')].filter((list) => !list.hidden).map((list) => list.children.length)"
    )
    kinds = "document.getElementById('workers').data.map((trace) => trace.type)"
    assert wide.run(events) == [3] and wide.run(kinds) == ["heatmap", "scatter", "scatter", "scatter"]
    wide.run("trial.value = 't4'; trial.dispatchEvent(new Event('change'))")
    wide.until(f"{kinds}.length === 1")
    assert wide.run(events) == []
    assert wide.run("document.getElementById('workers').layout.yaxis.ticktext[3]").startswith("3 (")
    wide.run("trial.value = 't9'; trial.dispatchEvent(new Event('change'))")
    wide.until(f"{kinds}.length === 4")
    assert wide.errors == []


def test_the_theme_follows_the_button(wide: Browser) -> None:
    back = "getComputedStyle(document.body).backgroundColor"
    text = "document.getElementById('against-time').layout.font.color"
    light = (wide.run(back), wide.run(text))
    wide.click("#theme")
    wide.until("document.documentElement.dataset.theme === 'dark'")
    assert wide.run(back) == "rgb(20, 23, 26)" and wide.run(text) == "#e8eaed"
    wide.click("#theme")
    assert (wide.run(back), wide.run(text)) == light


def test_it_prints_in_light_colours(wide: Browser) -> None:
    wide.click("#theme")
    assert wide.pdf().startswith(b"%PDF")
    wide.until("document.documentElement.dataset.theme === 'dark'")
    assert wide.run("document.getElementById('against-time').layout.width || null") is None
    wide.click("#theme")
    assert wide.errors == []


def long_names() -> Study:
    """Words that no line of a phone has room for, wherever a user chooses a name."""
    entry = make_entry("downpour", lost=True, stale=3)
    bad = replace(entry, name="downpour:" + "+".join(f"a_long_option_{i}=0.12345" for i in range(8)))
    other = replace(make_entry("ssp", workers=2), name="ssp" + "x" * 90)
    return make_study(
        [bad, other],
        directory=Path("runs") / ("y" * 150),
        task="t" * 80,
        metric="mean_absolute_percentage_error_of_all_horizons",
        command=["c" * 300],
        problems=["p" * 200],
        tuning=[bad],
    )


SECTIONS = """[...document.querySelectorAll('header, nav, footer, main > section')]
    .filter((part) => part.scrollWidth > part.clientWidth).map((part) => part.id || part.tagName)"""
PAGE = "[document.documentElement.scrollWidth, document.documentElement.clientWidth, innerWidth]"
FIGURES = "[...document.querySelectorAll('.figure')].filter((p) => p.getBoundingClientRect().right > innerWidth).length"


def test_on_a_dark_phone_nothing_is_wider_than_the_screen(tmp_path: Path) -> None:
    with Browser(tmp_path / "home", width=844, height=390, dark=True) as browser:
        for study in (full_study(), long_names()):
            browser.open(make(study, tmp_path))
            browser.until(DRAWN)
            for width in (390, 360):  # turned upright, and on a smaller one
                browser.resize(width, 844)
                browser.until(f"[...document.querySelectorAll('.main-svg')].every((p) => p.clientWidth < {width})")
                assert browser.run(PAGE) == [width] * 3
                assert browser.run(SECTIONS) == [] and browser.run(FIGURES) == 0
        assert browser.run("document.documentElement.dataset.theme") == "dark"
        assert browser.errors == []


def test_hostile_records_run_nothing(tmp_path: Path) -> None:
    with Browser(tmp_path / "home") as browser:
        browser.call("Page.addScriptToEvaluateOnNewDocument", source="window.alert = () => { window.evil = true }")
        browser.open(make(hostile_study(), tmp_path))
        browser.until(DRAWN)
        assert browser.run("[typeof window.evil, document.images.length]") == ["undefined", 0]
        assert browser.errors == [] and len(browser.requests) == 1
