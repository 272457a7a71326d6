"""The page that `specctl report` writes, in a real browser: zoomed, read, on a phone and in the dark."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import browser
from tests.browser import Browser, Tab
from tests.driver import Specctl
from tests.system.test_report import Tags, launched

EVIL = "</script><script>window.evil = 1</script><img src=x onerror='window.evil = 1'>"
CHART, LANES = ".chart .plot svg", ".lanes .plot svg"

Open = Callable[..., Tab]


@pytest.fixture(scope="module")
def chromium() -> Iterator[Browser]:
    if browser.installed() is None:
        if os.environ.get("CI") == "true":
            pytest.fail("there is no Chromium", pytrace=False)
        pytest.skip("there is no Chromium: apt-get install chromium")
    one = Browser()
    yield one
    one.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """one.html: 3,000 steps with a hole; all.html: that run, one whose worker died, and a hostile one."""
    specctl, folder = Specctl(), tmp_path_factory.mktemp("pages")
    good, bad, evil = (launched(specctl, *words) for words in (["3000"], ["300", "fails"], ["30", "hostile"]))
    assert specctl("report", good, "-m", "loss,tok_s", "-o", str(folder / "one.html")).code == 0
    assert specctl("report", good, bad, evil, "-m", f"loss,{EVIL}", "-o", str(folder / "all.html")).code == 0
    assert specctl("report", launched(specctl, "60", "zero"), "-o", str(folder / "zero.html")).code == 0
    specctl.close()
    yield folder


@pytest.fixture
def open_(chromium: Browser, pages: Path) -> Iterator[Open]:
    """Opens a page; in the end none of those that were opened may have complained or asked for anything."""
    tabs = []

    def start(name: str = "one.html", **how: Any) -> Tab:
        tabs.append(chromium.open((pages / name).as_uri(), **how))
        return tabs[-1]

    yield start
    for tab in tabs:
        assert tab.complaints == [] and [url.rpartition("/")[2] for url in tab.requests] in (["one.html"],
               ["all.html"], ["zero.html"])  # fmt: skip
        tab.close()


def span(tab: Tab, selector: str = CHART) -> tuple[str, str]:
    """From where to where a drawing goes, as it says itself."""
    label = str(tab.js(f"document.querySelector({json.dumps(selector)}).getAttribute('aria-label')"))
    first, _, last = label.partition(";")[0].removesuffix(" after the launch").partition(" to ")
    return first.split("step ")[-1].split(", ")[-1], last


def steps(tab: Tab) -> tuple[int, int]:
    first, last = span(tab)
    return int(first.replace(",", "")), int(last.replace(",", ""))


def readout(tab: Tab) -> str:
    return str(tab.js("document.querySelector('.chart').innerText"))


def test_several_runs_are_drawn_each_in_its_colour_and_dash_and_no_text_of_theirs_runs(open_: Open) -> None:
    tab = open_("all.html")
    drawn = tab.js(f"[...document.querySelectorAll('{CHART} .curve')].map(one => one.getAttribute('class'))")
    assert drawn[:3] == ["curve run-0 dash-0", "curve run-1 dash-1", "curve run-2 dash-2"]
    strokes = tab.js(f"[...document.querySelectorAll('{CHART} .curve')].map(one => getComputedStyle(one).stroke)")
    assert len(set(strokes)) == 3
    assert tab.js("typeof window.evil") == "undefined" and tab.js("document.querySelector('img')") is None
    titles = tab.js("[...document.querySelectorAll('figcaption')].map(one => one.innerText.trim())")
    assert titles == ["loss", EVIL]
    tab.click("button[data-run='0']")
    assert tab.js(f"document.querySelectorAll('{CHART} .curve').length") == 3, "of two figures, less one run"
    assert steps(tab)[1] == 300, "what is hidden takes no room"


def test_nothing_of_a_run_gets_out_of_its_place_on_the_page(pages: Path) -> None:
    text = (pages / "all.html").read_text()
    page = Tags(text)
    assert EVIL in page.text and "\\x1b[31mred" in page.text and "\\x00nul" in page.text
    assert not re.search("[\x00\x1b\u202e\ud800]", text)
    assert not [tag for tag, _ in page.tags if tag == "img"] and [tag for tag, _ in page.tags].count("script") == 2
    assert "x" * 30_000 not in text, "a line of 300,000 characters is cut"


def test_a_hole_stays_a_hole_and_an_outlier_is_seen_whatever_it_is_averaged_with(open_: Open) -> None:
    tab = open_()
    path = tab.js(f"document.querySelector('{CHART} .curve').getAttribute('d')")
    assert path.count("M") == 2 and tab.js(f"document.querySelector('{CHART} .band').getAttribute('d')").count("M") == 2
    labels = tab.js(f"[...document.querySelectorAll('{CHART} text')].map(one => one.textContent)")
    assert "40" in labels, "the outlier of 50 is within the scale, although no mean is near it"


def test_dragging_zooms_all_curves_and_a_double_click_shows_all_again(open_: Open) -> None:
    tab = open_()
    assert steps(tab) == (1, 3000)
    left, top, width, height = tab.box(CHART)
    middle = top + height / 2
    tab.drag((left + width * 0.3, middle), (left + width * 0.5, middle))
    first, last = steps(tab)
    assert 500 < first < 1000 and 1300 < last < 1700
    assert len({tab.js(f"document.querySelectorAll('.chart svg[aria-label]')[{n}].getAttribute('aria-label')"
                       ".split(',').slice(1).join()") for n in (0, 1)}) == 1  # fmt: skip
    for count in (1, 2):
        tab.mouse("mousePressed", left + width / 2, middle, button="left", clickCount=count)
        tab.mouse("mouseReleased", left + width / 2, middle, button="left", clickCount=count)
    tab.drawn()
    assert steps(tab) == (1, 3000)


def test_a_wheel_scrolls_past_until_it_is_meant(open_: Open) -> None:
    tab = open_(height=500)
    left, top, width, height = tab.box(CHART)
    place = left + width / 2, top + height / 2
    before = tab.js("scrollY")
    for delta in (-1, 120):
        tab.wheel(*place, delta)
        assert steps(tab) == (1, 3000)
    tab.js("new Promise(done => { const look = () => scrollY > " + str(before) + " ? done() : setTimeout(look, 20);"
           "look(); })")  # fmt: skip
    left, top, width, height = tab.box(CHART)
    place = left + width / 2, top + height / 2
    tab.wheel(*place, -120, ctrl=True)
    first, last = steps(tab)
    assert 1 < first < 1500 < last < 3000
    tab.click("#reset")
    tab.click(CHART)
    tab.wheel(*place, -120)
    assert steps(tab) == (first, last), "whoever has clicked there means it"


def test_fingers_pinch_and_move_and_a_phone_never_scrolls_sideways(open_: Open) -> None:
    tab = open_("all.html", width=360, height=780, phone=True)
    for width in (320, 360, 414):
        tab.call("Emulation.setDeviceMetricsOverride", width=width, height=780, mobile=True, deviceScaleFactor=2)
        tab.js("document.querySelectorAll('details').forEach(one => { one.open = true; })")
        tab.drawn()
        assert tab.js("document.documentElement.scrollWidth") <= width
        wide = tab.js(
            "[...document.querySelectorAll('section *')].filter(one => !one.closest('pre, svg, thead, .lanes .readout')"
            f" && one.getBoundingClientRect().right > {width + 1}).map(one => one.outerHTML.slice(0, 80))"
        )
        assert wide == []
    left, top, width, _ = tab.box(CHART)
    y = top + 60
    tab.touch([(left + 150, y), (left + 120, y), (left + 100, y)], [(left + 200, y), (left + 230, y), (left + 260, y)])
    first, last = steps(tab)
    assert first > 1 and last < 3000 and last - first < 2000
    tab.touch([(left + 250, y), (left + 200, y), (left + 150, y)])
    assert steps(tab)[0] > first and steps(tab)[1] - steps(tab)[0] == pytest.approx(last - first, abs=2)
    assert "step " in readout(tab), "and where a finger was, the figures are read"


def test_everything_is_reached_by_the_keyboard(open_: Open) -> None:
    tab = open_()
    reached = set()
    for _ in range(40):
        tab.call("Input.dispatchKeyEvent", type="rawKeyDown", key="Tab", windowsVirtualKeyCode=9)
        tab.call("Input.dispatchKeyEvent", type="keyUp", key="Tab", windowsVirtualKeyCode=9)
        reached.add(tab.js("document.activeElement.getAttribute('aria-label') || document.activeElement.innerText"))
    said = " ".join(filter(None, reached))
    for wanted in ("steps", "log", "reset", "loss, step 1", "tok/s, step 1", "time lines", "in words"):
        assert wanted in said, said
    tab.js(f"document.querySelector('{CHART}').focus()")
    outline = tab.js(f"getComputedStyle(document.querySelector('{CHART}')).outlineStyle")
    assert outline == "solid"
    tab.key("ArrowRight")
    tab.key("ArrowRight")
    assert "step 4" in readout(tab) and "in 4 steps)" in readout(tab)
    tab.key("+", "+")
    assert steps(tab)[1] < 1600
    tab.key("ArrowRight")
    assert "step 8" in readout(tab)
    tab.key("0", "0")
    assert steps(tab) == (1, 3000)


def test_what_a_curve_says_under_the_pointer_is_what_was_written_down_there(open_: Open) -> None:
    tab = open_()
    left, top, width, height = tab.box(CHART)

    def at(step: float) -> str:
        tab.hover(left + 54 + (step - 1) / 2999 * (width - 64), top + height / 2)
        return readout(tab)

    assert "7.1" in at(20) or "6." in at(20)
    assert "nothing was written down here" in at(1500), "a hole is no value"
    tab.js("(() => { const one = document.querySelector('#smooth'); one.value = 0.9;"
           "one.dispatchEvent(new Event('input')); })()")  # fmt: skip
    assert "smoothed" in at(2000)
    assert tab.js(f"document.querySelector('{CHART}').querySelectorAll('.raw').length") == 1, "the raw curve stays"
    tab.click("[data-x=time]")
    first, last = span(tab)
    assert first.endswith(" s") and last.startswith("5 min ")


def test_a_log_scale_says_what_it_cannot_show(open_: Open) -> None:
    tab = open_("zero.html")
    assert "log scale" not in readout(tab)
    tab.click("[data-y=log]")
    assert "points of 0 or less have no place on a log scale" in readout(tab)
    drawn = tab.js("document.querySelector('#charts').innerHTML")
    assert "NaN" not in drawn and "Infinity" not in drawn


def test_the_marks_of_an_axis_differ_however_close_they_are(open_: Open) -> None:
    tab = open_("zero.html")
    texts = "[...one.querySelectorAll('text[text-anchor=end]')].map((text) => text.textContent)"
    marks = f"[...document.querySelectorAll('.chart')].map((one) => {texts})"
    drawn = tab.js(marks)
    assert ["0.00096", "0.00098", "0.001", "0.00102", "0.00104"] in drawn, "a learning rate that is always the same"
    assert all(len(set(one)) == len(one) >= 2 for one in drawn)


def test_a_workers_time_line_shows_its_shares_its_death_and_nothing_where_nothing_is_known(open_: Open) -> None:
    tab = open_("all.html")
    lane = "[data-lanes='1'] .plot svg"
    kinds = tab.js(f"[...document.querySelectorAll({json.dumps(lane + ' [class^=kind-]')})].map(one =>"
                   "one.getAttribute('class'))")  # fmt: skip
    assert {"kind-start", "kind-warm-up", "kind-train", "kind-busy", "kind-wait_input", "kind-dead"} <= set(kinds)
    assert "kind-wait_peers" not in kinds, "nobody waited for peers"
    left, top, width, height = tab.box(lane)
    tab.hover(left + 2, top + height / 2)
    said = tab.js("document.querySelector(\"[data-lanes='1'] .readout\").textContent")
    assert "drafter-0: nothing was written down" in said
    tab.hover(left + width * 0.5, top + height / 2)
    said = tab.js("document.querySelector(\"[data-lanes='1'] .readout\").textContent")
    assert "drafter-0: steps" in said or "drafter-0: step " in said
    assert "busy 60 %, input 30 %, room 10 %;" in said
    tab.drag((left + width * 0.1, top + 20), (left + width * 0.2, top + 20))
    assert span(tab, lane) != ("0 s", span(tab, lane)[1]) and span(tab, "[data-lanes='0'] .plot svg")[0] == "0 s"


CONTRAST = """
(() => {
  const rgb = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = (part) => { part /= 255; return part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4; };
  const lum = ([r, g, b]) => 0.2126 * light(r) + 0.7152 * light(g) + 0.0722 * light(b);
  const ratio = (a, b) => { const [x, y] = [lum(a), lum(b)].sort((p, q) => q - p); return (x + 0.05) / (y + 0.05); };
  const behind = (one) => {
    for (; one; one = one.parentElement) {
      const color = rgb(getComputedStyle(one).backgroundColor);
      if (color.length < 4 || color[3] > 0) return color;
    }
    return [255, 255, 255];
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const one = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !one.checkVisibility() || one.closest('script, style, title')) continue;
    const style = getComputedStyle(one);
    const is = ratio(rgb(one.closest('svg') ? style.fill : style.color), behind(one));
    if (is < 4.5) found.push(`${is.toFixed(2)}: ${walk.currentNode.data.trim().slice(0, 40)} (${one.className})`);
  }
  for (const one of document.querySelectorAll('.curve:not(.raw), .swatch path')) {
    const is = ratio(rgb(getComputedStyle(one).stroke), behind(one));
    if (is < 3) found.push(`${is.toFixed(2)}: ${one.getAttribute('class')}`);
  }
  return found;
})()
"""


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
def test_every_text_and_curve_stands_out_from_what_is_behind_it(open_: Open, dark: bool) -> None:
    tab = open_("all.html", dark=dark)
    tab.js("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    ground = tab.js("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, ground[4:-1].split(","))) < 120) is dark
    assert tab.js(CONTRAST) == []


def test_on_paper_everything_is_open_and_without_a_script_the_words_are_there(open_: Open) -> None:
    tab = open_()
    closed = "[...document.querySelectorAll('details')].filter(one => !one.open).length"
    before = tab.js(closed)
    assert before > 0
    tab.js("dispatchEvent(new Event('beforeprint'))")
    assert tab.js(closed) == 0
    tab.js("dispatchEvent(new Event('afterprint'))")
    assert tab.js(closed) == before
    assert tab.pdf().startswith(b"%PDF")
    silent = open_("all.html", script=False)
    text = silent.call("DOM.getOuterHTML", nodeId=silent.call("DOM.getDocument")["root"]["nodeId"])["outerHTML"]
    assert "drawn by a script inside this page" in text and "raise ValueError" in text
