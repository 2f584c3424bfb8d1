"""The page and the trace of a report: what they say, that they load nothing, and that a browser shows them."""

from __future__ import annotations

import base64
import json
import re
import shutil
import sys
import zlib
from collections.abc import Iterator
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest
import torch

from mfsdp.config.layout import plan
from mfsdp.planning.explain import explain
from mfsdp.reports import charts, chrome, layouts, page
from tests.helpers.toys import BF16, Toy2

EVIL = "<img src=x onerror=alert(1)>&\"'</script>"


def explained(world: int = 8, **kwargs: Any) -> Any:
    with torch.device("meta"):
        model = Toy2().to(torch.bfloat16)
        x = torch.empty(256, 1024, dtype=torch.bfloat16)
    units = ["layers.0", "layers.2"]
    return explain(model, (x,), world=world, units=units, mp_policy=BF16, suggest=False, **kwargs)


@pytest.fixture(scope="module")
def report() -> Any:
    return explained()


@pytest.fixture(scope="module")
def html(report: Any) -> str:
    pytest.importorskip("bokeh", reason="the page needs Bokeh: pip install 'mfsdp[report]'")
    return page.render(report)


def packed(html: str) -> Any:
    """The data that the page carries."""
    text = re.search(r'<script id="data" type="text/plain">([^<]*)</script>', html)
    assert text is not None
    return json.loads(zlib.decompress(base64.b64decode(text[1])))


def test_the_trace_lasts_as_long_as_the_report_says(report):
    events = json.loads(chrome.chrome(report))["traceEvents"]
    spans = [e for e in events if e["ph"] == "X"]
    lines = [x for v in report.views for x in v.lines if x.end > x.start]
    assert len(spans) == len(lines) + 1
    for e, x in zip(spans, lines, strict=False):
        assert (e["name"], e["ts"], e["dur"]) == (
            x.text,
            pytest.approx(x.start * 1e6),
            pytest.approx(1e6 * (x.end - x.start)),
        )
    assert spans[-1]["name"] == "optimizer" and spans[-1]["ts"] + spans[-1]["dur"] == pytest.approx(report.step * 1e6)
    waits = sum(e["args"].get("exposed_us", 0) for e in spans)
    assert waits == pytest.approx(1e6 * sum(x.seconds for x in report.exposed))


def test_the_trace_names_its_lanes_and_counts_bytes(report):
    events = json.loads(chrome.chrome(report))["traceEvents"]
    names = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert names == {0: "Compute", 1: "Gather", 2: "Reduce"}
    assert {e["tid"] for e in events if e["ph"] == "X"} == set(names)
    counts = [e for e in events if e["ph"] == "C"]
    assert [e["ts"] for e in counts] == sorted(e["ts"] for e in counts)
    assert max(e["args"]["bytes"] for e in counts) == report.peak


class Loads(HTMLParser):
    """Everything that a tag would have the browser fetch."""

    def __init__(self) -> None:
        super().__init__()
        self.found: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found += [v or "" for k, v in attrs if k in ("src", "href", "data", "action", "poster", "srcset")]


@pytest.mark.slow
def test_the_page_loads_nothing(html):
    loads = Loads()
    loads.feed(html)
    assert loads.found == ["data:,"]
    assert "default-src 'none'" in html, "the browser itself forbids every request"
    own = html.split('<script id="data"')[1]
    assert not re.search(r"\b(fetch|XMLHttpRequest|WebSocket|import)\s*\(", own)


@pytest.mark.slow
def test_names_are_escaped(report):
    pytest.importorskip("bokeh", reason="the page needs Bokeh: pip install 'mfsdp[report]'")
    view = report.views[0]
    line = replace(view.lines[3], text=EVIL, source=EVIL)
    unit = replace(view.units[0], fqn=EVIL)
    views = [
        replace(view, lines=(*view.lines[:3], line, *view.lines[4:]), units=(unit, *view.units[1:])),
        *report.views[1:],
    ]
    html = page.render(replace(report, name=EVIL, views=views, warnings=[EVIL]))
    assert "<img" not in html
    assert html.count("&lt;img src=x onerror=alert(1)&gt;") >= 3
    assert packed(html)["programs"][0]["marks"][3][4] == EVIL, "as data it is whole"


@pytest.mark.slow
def test_every_listing_is_there(report, html):
    programs = packed(html)["programs"]
    assert [p["phase"] for p in programs] == ["forward", "backward"]
    for p, view in zip(programs, report.views, strict=True):
        assert [(s["name"], s["text"]) for s in p["stages"]] == [(s.name, s.listing) for s in view.stages]
        final = view.stages[-1].listing.split("\n")
        assert [final[m[0]] for m in p["marks"]] == [x.gutter for x in view.lines]


def test_a_missing_bokeh_says_what_to_install(report, monkeypatch):
    monkeypatch.setitem(sys.modules, "bokeh.resources", None)
    with pytest.raises(ImportError, match=re.escape("pip install 'mfsdp[report]'")):
        page.render(report)


@pytest.mark.parametrize("world", [1, 3, 8])
def test_pieces_of_the_ranks_are_the_whole_buffer(world):
    layout = plan([("a", (5, 48)), ("b", (7,)), ("c", (3, 80)), ("empty", (0, 4))], world)
    pieces = [list(layouts._pieces(layout, r, 0)) for r in range(world)]
    for of_rank in pieces:
        edges = [0, *(p["right"] for p in of_rank)]
        assert [p["left"] for p in of_rank] == edges[:-1] and edges[-1] == layout.shard_numel
    padding = sum(p["right"] - p["left"] for of_rank in pieces for p in of_rank if p["text"] == "padding")
    assert padding == layout.pad


def test_the_first_ranks_and_the_last_are_shown():
    assert layouts._shown(8) == list(range(8))
    assert layouts._shown(64) == [0, 1, 2, 3, 4, 5, None, 63]


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    playwright = pytest.importorskip("playwright.sync_api", reason="no playwright: pip install playwright")
    found = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if found is None:
        pytest.skip("no browser: install chromium (Debian: apt-get install chromium)")
    with playwright.sync_playwright() as p:
        started = p.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def opened(browser: Any, html: str, tmp_path: Path) -> Iterator[Any]:
    """The page in a browser without network; whatever goes wrong fails the test."""
    path = tmp_path / "page.html"
    path.write_text(html, encoding="utf-8")
    context = browser.new_context(viewport={"width": 1440, "height": 960}, offline=True)
    tab, wrong = context.new_page(), []
    tab.on("console", lambda m: wrong.append(m.text) if m.type in ("error", "warning") else None)
    tab.on("pageerror", lambda e: wrong.append(str(e)))
    tab.on("request", lambda r: wrong.append(r.url) if not r.url.startswith(("file:", "data:", "blob:")) else None)
    tab.on("requestfailed", lambda r: wrong.append(f"failed: {r.url}"))
    tab.goto(path.as_uri())
    tab.wait_for_selector("body[data-ready=yes]", timeout=30_000)
    yield tab
    assert wrong == []
    context.close()


RED = """() => {
  const find = (root) => [...root.querySelectorAll("*")].flatMap((e) =>
    [...(e.tagName === "CANVAS" ? [e] : []), ...(e.shadowRoot ? find(e.shadowRoot) : [])]);
  const out = {};
  for (const c of find(document.querySelector("#charts"))) {
    if (!c.width || !c.height) continue;
    const {data} = c.getContext("2d").getImageData(0, 0, c.width, c.height);
    for (let i = 0; i < data.length; i += 4)
      if (data[i + 3] === 255) { const k = `${data[i]},${data[i + 1]},${data[i + 2]}`; out[k] = (out[k] || 0) + 1; }
  }
  return out;
}"""
"""How many pixels of each colour the charts have."""


def rgb(colour: str) -> str:
    return ",".join(str(int(colour[i : i + 2], 16)) for i in (1, 3, 5))


def lines_of(tab: Any, look: str = "") -> list[str]:
    return tab.locator(f"#listing .r{look}").all_text_contents()


@pytest.mark.slow
def test_the_charts_are_drawn(opened):
    opened.wait_for_timeout(500)
    pixels = opened.evaluate(RED)
    for kind in ("matrix", "other", "sharding", "G", "R", "wait"):
        assert pixels.get(rgb(charts.KINDS[kind][1]), 0) > 200, f"no {kind} to be seen"


@pytest.mark.slow
def test_a_box_tells_its_line_and_leads_to_it(opened, report):
    chart = opened.locator("#charts").bounding_box()
    x, y = chart["x"] + 130, chart["y"] + 80
    opened.mouse.move(x, y)
    tip = opened.locator(".bk-Tooltip", has_text="wait u0_full")
    tip.get_by_text("compute stands still here").wait_for(timeout=5000)
    text = tip.locator(".bk-tooltip-content").text_content()
    assert "unit layers.0" in text and charts.WHY[report.exposed[0].why] in text
    opened.click("#stages >> text=gather")
    opened.mouse.click(x, y)
    at = opened.locator("#listing .at")
    at.wait_for(timeout=5000)
    assert "wait u0_full" in at.inner_text()
    assert opened.locator("#stages .on").inner_text() == "assign_groups"


@pytest.mark.slow
def test_passes_and_programs_switch_and_show_what_changed(opened, report):
    final = report.views[0].stages[-1].listing
    assert "; mfsdp  Toy2  assign_groups  forward       world 8" in lines_of(opened)[0]
    assert len(lines_of(opened)) == len(final.rstrip("\n").split("\n"))
    opened.click("#modes >> text=diff")
    opened.click("#stages >> text=prefetch")
    assert "prefetch  forward" in lines_of(opened)[0]
    assert ["u1_full" in x and "all_gather" in x for x in lines_of(opened, ".mvd")] == [True]
    assert len(lines_of(opened, ".gone")) == 1 and not lines_of(opened, ".add") and not lines_of(opened, ".del")
    opened.click("#stages >> text=reshard")
    assert [x.split()[-4:-2] for x in lines_of(opened, ".add")] == [["free", "u0_full"], ["free", "u1_full"]]
    opened.click("#stages >> text=plan_memory")
    assert len(lines_of(opened, ".chg")) == 2
    opened.click("#programs >> text=backward")
    assert "plan_memory  backward" in lines_of(opened)[0]
    assert any("u1_gfull" in x for x in lines_of(opened, ".chg"))
    opened.click("#modes >> text=changes only")
    assert lines_of(opened, ".skip")
    opened.click("#modes >> text=whole")
    assert "\n".join(x[2:] for x in lines_of(opened)) == report.views[1].stages[-2].listing.rstrip("\n")


@pytest.mark.slow
def test_zoom_and_tabs(opened):
    axis = "[Bokeh.documents[0].get_model_by_name('time')].map((x) => x.end - x.start)[0]"
    whole = opened.evaluate(axis)
    chart = opened.locator("#charts").bounding_box()
    opened.mouse.move(chart["x"] + 500, chart["y"] + 80)
    opened.mouse.wheel(0, -400)
    opened.wait_for_timeout(300)
    assert opened.evaluate(axis) < whole
    opened.click("#spans >> text=whole step")
    assert opened.evaluate(axis) == pytest.approx(whole)
    for name, words in (("Exposed waits", "hops take longer than bytes"), ("Memory", "peak"), ("Setup", "prefetch")):
        opened.click(f"#tabs >> text={name}")
        assert words in opened.locator(".body:visible").inner_text()
    opened.click("#tabs >> text=Units")
    opened.wait_for_function("document.querySelector('#layout-0').children.length > 0")
    assert "layers.0 .. layers.2" in opened.locator(".body:visible").inner_text()


@pytest.mark.slow
def test_evil_names_do_nothing(browser, report, tmp_path):
    pytest.importorskip("bokeh", reason="the page needs Bokeh: pip install 'mfsdp[report]'")
    view = report.views[0]
    stage = replace(view.stages[-1], listing=view.stages[-1].listing + EVIL)
    lines = tuple(replace(x, text=EVIL, source=EVIL, unit=EVIL) for x in view.lines)
    unit = replace(view.units[0], fqn=EVIL)
    views = [replace(view, stages=(*view.stages[:-1], stage), lines=lines, units=(unit,)), *report.views[1:]]
    (tmp_path / "page.html").write_text(page.render(replace(report, name=EVIL, views=views)), encoding="utf-8")
    tab = browser.new_page(viewport={"width": 1440, "height": 960})
    tab.on("dialog", lambda d: pytest.fail("a name ran as script"))
    tab.goto((tmp_path / "page.html").as_uri())
    tab.wait_for_selector("body[data-ready=yes]", timeout=30_000)
    chart = tab.locator("#charts").bounding_box()
    tab.mouse.move(chart["x"] + 130, chart["y"] + 80)
    tab.locator(".bk-Tooltip").get_by_text(EVIL, exact=True).first.wait_for(timeout=5000)
    tab.click("#tabs >> text=Units")
    tab.wait_for_timeout(300)
    assert tab.locator("img[onerror]").count() == 0
    assert EVIL in tab.locator("h1").inner_text()
