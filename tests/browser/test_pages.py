"""The pages of reports in a real browser: nothing complains, nothing is cut off, and every word can be read.

`tox -e browser` runs these. Where Chromium is missing they are skipped, and the reason says how to install it; with CI
set they fail.
"""

import os
import pathlib

import chromium
import numpy as np
import pytest

import pyrope
from pyrope import LongRoPE, Rope, check_attention, check_rotation, identify
from pyrope.oracle import gallery, page, traces
from pyrope.oracle.report import Failure, Report

pytestmark = pytest.mark.skipif(
    chromium.PROGRAM is None and not os.environ.get("CI"), reason=f"Chromium is missing: {chromium.INSTALL}"
)
HOSTILE = "</style><script>alert(1)</script><img src=x onerror=alert(1)> & " + "unbroken" * 40
WIDTHS, SCHEMES = (1280, 390), ("light", "dark")


def sections() -> dict[str, list]:
    """A page of every kind."""
    rope, other = Rope(64, 500000.0, "half"), Rope(64, 10000.0, "half")
    factors = tuple(1 + k / 10 for k in range(32))
    long = Rope(64, 10000.0, "half", scaling=LongRoPE(factors, factors, 4.0, 4096)).at(8192)
    wrong = check_rotation(lambda x, m: pyrope.rotate(x, m, other), rope)
    right = check_rotation(lambda x, m: pyrope.rotate(x, m, rope), rope)
    listed = check_rotation(lambda x, m: pyrope.rotate(x, m, other), long)
    lost = check_rotation(lambda x, m: np.full_like(x, np.nan), rope)
    failed = Report(HOSTILE, HOSTILE, "not judged", failure=Failure(HOSTILE, HOSTILE, HOSTILE, RuntimeError(HOSTILE)))
    attention = check_attention(lambda q, k, v: pyrope.attention(q, k, v, causal=True, scale=1.0))
    x = np.arange(1.0, 9.0).reshape(1, 2, 4)
    trace = traces.diff_traces({"embedding": x, "logits": x}, {"embedding": x, "logits": 2 * x})
    equivalent = Report("an-output-with-a-long-name-float32", "x", "equivalent", notes=("the same scores",))
    every = [wrong, right, listed, failed, attention, equivalent, wrong]
    rows = [gallery.Row(gallery.Exhibit(name, len, rope), one) for name, one in (("one", right), ("two", wrong))]
    return {
        "wrong": [page.report_section(wrong)],
        "right": [page.report_section(right)],
        "lists": [page.report_section(listed)],
        "lost": [page.report_section(lost)],
        "failed": [page.report_section(failed)],
        "attention": [page.report_section(attention)],
        "trace": [page.report_section(trace)],
        "vectors": [page.verification_section(every)],
        "gallery": [page.gallery_section(rows)],
        "identified": [page.identification_section(identify(gallery.rotate_half, 64))],
        "unknown": [page.identification_section(identify(lambda x, m: x * (1 + m[:, None] % 2).astype(x.dtype), 16))],
    }


@pytest.fixture(scope="module")
def pages(tmp_path_factory) -> dict[str, pathlib.Path]:
    folder = tmp_path_factory.mktemp("pages")
    for name, parts in sections().items():
        page.write_page(folder / f"{name}.html", name, *parts)
    return {path.stem: path for path in folder.glob("*.html")}


@pytest.fixture(scope="module")
def browser():
    if chromium.PROGRAM is None:
        raise RuntimeError(f"Chromium is missing: {chromium.INSTALL}")
    with chromium.Chromium() as opened:
        yield opened


# What reaches beyond the window, or is hidden by a box that is too small for it.
CUT_OFF = """(() => {
  const width = document.documentElement.clientWidth;  // innerWidth of a phone grows with what is in it
  const named = e => `${e.tagName} ${e.className} ${e.textContent.slice(0, 40)}`;
  const cut = [...document.querySelectorAll("body *")].filter(e => {
    const box = e.getBoundingClientRect();
    if (!box.width || !box.height) return false;
    if (e.tagName == "IMG") return false;  // a figure scrolls on a phone
    if (box.right > width + 0.6 || box.left < -0.6) return true;
    return e.tagName != "FIGURE" && getComputedStyle(e).display != "inline" && e.scrollWidth > e.clientWidth + 1;
  });
  const wide = document.documentElement.scrollWidth > width ? ["the page is wider than the window"] : [];
  return [...wide, ...cut.map(named)].slice(0, 5);
})()"""

# Words whose contrast to what is behind them is below 4.5 (WCAG 2.2, AA).
FAINT = """(() => {
  const rgb = text => text.match(/[\\d.]+/g).map(Number);
  const luminance = c => c.slice(0, 3).map(v => v / 255).map(v => v <= .04045 ? v / 12.92 : ((v + .055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [.2126, .7152, .0722][i], 0);
  const behind = e => { for (; e; e = e.parentElement) {
      const c = rgb(getComputedStyle(e).backgroundColor);
      if (c.length < 4 || c[3] > 0) return c; }
    return [255, 255, 255]; };
  const contrast = (a, b) => { const [x, y] = [luminance(a), luminance(b)].sort((p, q) => q - p);
    return (x + .05) / (y + .05); };
  const faint = [];
  const look = (e, colour, least) => { const value = contrast(rgb(colour), behind(e));
    if (value < least) faint.push(`${value.toFixed(2)} ${e.tagName} ${e.textContent.slice(0, 30)}`); };
  for (const e of document.querySelectorAll("body *")) {
    const style = getComputedStyle(e), box = e.getBoundingClientRect();
    if (e.tagName == "STYLE" || !box.width) continue;
    if ([...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()))
      look(e, style.color, 4.5);
  }
  return faint.slice(0, 5);
})()"""
# The size of the smallest letters, in pixels of the screen.
SMALLEST = """Math.min(...[...document.querySelectorAll("body *")]
  .filter(e => [...e.childNodes].some(n => n.nodeType == 3 && n.textContent.trim()) && e.getBoundingClientRect().width
    && e.tagName != "STYLE")
  .map(e => parseFloat(getComputedStyle(e).fontSize)))"""
# Pictures that the browser could not draw.
BROKEN = "[...document.images].filter(e => !e.complete || !e.naturalWidth).map(e => e.alt)"
OPEN_ALL = 'document.querySelectorAll("details").forEach(e => { e.open = true; })'


def looks(browser, path, width, scheme, media="") -> None:
    browser.open(path, width, scheme, media)
    browser.value(OPEN_ALL)
    assert browser.complaints == []
    assert browser.value(CUT_OFF) == []
    assert browser.value(FAINT) == []
    assert browser.value(SMALLEST) >= 9
    assert browser.value(BROKEN) == []


@pytest.mark.parametrize("scheme", SCHEMES)
@pytest.mark.parametrize("width", WIDTHS)
def test_pages_are_whole_and_legible(browser, pages, width, scheme, tmp_path):
    backgrounds = set()
    for path in pages.values():
        looks(browser, path, width, scheme)
        backgrounds.add(browser.value("getComputedStyle(document.querySelector('.pyrope')).backgroundColor"))
    assert backgrounds == {"rgb(255, 255, 255)" if scheme == "light" else "rgb(21, 24, 28)"}
    if folder := os.environ.get("PYROPE_SCREENSHOTS"):
        for name, path in pages.items():
            browser.open(path, width, scheme)
            browser.screenshot(pathlib.Path(folder, f"{name}-{width}-{scheme}.png"))


def test_pages_can_be_printed_from_a_dark_screen(browser, pages):
    for path in pages.values():
        looks(browser, path, 794, "dark", "print")
        assert (
            browser.value("getComputedStyle(document.querySelector('.pyrope')).backgroundColor") == "rgb(255, 255, 255)"
        )


def test_nothing_of_a_candidate_runs(browser, pages):
    browser.open(pages["failed"], 390)
    assert browser.value("document.querySelectorAll('script, img').length") == 0
    assert browser.value("document.querySelector('h1').textContent").count("<script>alert(1)</script>") == 2


def test_a_notebook_keeps_its_own_style(browser, tmp_path):
    report = check_rotation(gallery.rotate_half, Rope(16, 500000.0, "half"))
    outside = '<body style="background: rgb(250, 240, 230)"><p id="own">a cell</p>'
    (tmp_path / "cell.html").write_text(f"<!DOCTYPE html><title>x</title>{outside}{report._repr_html_()}", "utf-8")
    looks(browser, tmp_path / "cell.html", 390, "dark")
    assert browser.value("getComputedStyle(document.querySelector('#own')).color") == "rgb(0, 0, 0)"


@pytest.mark.parametrize(
    "markup, measure",
    [
        ('<div style="width: 500px">wide</div>', CUT_OFF),
        ('<div style="overflow: hidden; width: 50px; white-space: nowrap">hidden words</div>', CUT_OFF),
        ('<p style="color: #999; background: #eee">faint</p>', FAINT),
        ('<img alt="x" src="data:image/svg+xml;base64,AAAA">', BROKEN),
    ],
)
def test_the_measurements_see_what_is_wrong(browser, tmp_path, markup, measure):
    phone = '<meta name="viewport" content="width=device-width, initial-scale=1">'
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html><title>x</title>{phone}<body>{markup}", "utf-8")
    browser.open(tmp_path / "bad.html", 390)
    assert browser.value(measure) != []


@pytest.mark.parametrize("script", ["console.error('x')", "throw Error('x')", "fetch('http://127.0.0.1:9/')"])
def test_the_browser_hears_complaints(browser, tmp_path, script):
    (tmp_path / "bad.html").write_text(f"<!DOCTYPE html><title>x</title><script>{script}</script>", "utf-8")
    browser.open(tmp_path / "bad.html", 390)
    assert browser.complaints != []
