"""Pages in a browser: everyone can read and use them, they ask for nothing, they look as they did.

Chromium comes from the system (Debian's package ``chromium``); without it these tests are left out, and say so.
The pictures under tests/pictures are small, grey and compared roughly: what moves, vanishes or changes its shade is
seen, how a letter is drawn is not. ``PARO_ADVISE_NEW_PICTURES=1`` writes them anew.
"""

from __future__ import annotations

import io
import json
import os
import shutil
from pathlib import Path

import pytest
from every_page import make_pages

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
PICTURES = Path(__file__).parent / "pictures"
NAMES = (
    "analysis", "analysis of a large job", "analysis of a log", "plan", "plan to measure first", "comparison", "hang",
    "history",
)  # fmt: skip
WAYS = ("light", "dark", "narrow", "print")
WIDTHS = {"narrow": 400}
RULES = ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]
PICTURE_WIDTH, BLOCK = 160, 8  # of a kept picture, px
# Of 255: shades of a block of 8 x 8 that differ from the page's own by more are drawn upon, and those that differ
# between two pictures by more are seen as different. Of what is drawn upon some may, as numbers have other digits on
# other machines.
DRAWN, SEEN, MOST_BLOCKS = 4, 16, 0.1

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no Chromium: apt-get install chromium")


@pytest.fixture(scope="module")
def pages(tmp_path_factory):
    return make_pages(tmp_path_factory.mktemp("pages"))


@pytest.fixture(scope="module")
def browser():
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        started = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--font-render-hinting=none"])
        yield started
        started.close()


@pytest.fixture
def open_page(browser, pages):
    """Return what opens a page in one of the ways, and notes requests and errors."""
    contexts = []

    def opened(name, way="light", *, scripts=True, tested=False):
        context = browser.new_context(
            color_scheme="dark" if way == "dark" else "light",
            viewport={"width": WIDTHS.get(way, 1280), "height": 900},
            java_script_enabled=scripts,
            bypass_csp=tested,
        )
        contexts.append(context)
        page = context.new_page()
        page.seen = []
        page.on("request", lambda request: page.seen.append(request.url))
        page.on("pageerror", lambda error: page.seen.append(f"error {error}"))
        page.on("console", lambda message: page.seen.append(f"console {message.text}"))
        if way == "print":
            page.emulate_media(media="print")
        page.goto(f"file://{pages[name]}")
        return page

    yield opened
    for context in contexts:
        context.close()


@pytest.mark.parametrize(
    "way", ["light", *(pytest.param(way, marks=pytest.mark.variant) for way in ("dark", "narrow"))]
)
@pytest.mark.parametrize("name", NAMES)
def test_no_rule_of_accessibility_is_broken(open_page, name, way):
    """The rules are axe-core's, WCAG 2.2 A and AA and its best practices."""
    import axe_playwright_python

    (script,) = Path(axe_playwright_python.__file__).parent.rglob("axe.min.js")
    page = open_page(name, way, tested=True)
    page.evaluate(script.read_text())
    for box in page.query_selector_all("details"):
        box.evaluate("box => { box.open = true; }")
    result = page.evaluate(f"axe.run(document, {{runOnly: {json.dumps(RULES)}, resultTypes: ['violations']}})")
    assert len(result["passes"]) > 20
    assert [(rule["id"], [node["html"][:200] for node in rule["nodes"]]) for rule in result["violations"]] == []


@pytest.mark.parametrize("way", ["light", "dark"])
def test_marks_stand_out_from_the_page(open_page, way):
    """Non-text contrast of 3 : 1 (WCAG 2.2, 1.4.11) between each colour of a chart and the page."""
    page = open_page("analysis", way)
    names = [
        "compute",
        "parameter",
        "gradient",
        "optimizer",
        "other",
        "unknown",
        "rest",
        "idle",
        "exposed",
        "hidden",
        "wait",
        "bad",
    ]
    script = "names => names.map(name => getComputedStyle(document.documentElement).getPropertyValue(`--${name}`))"
    colours = page.evaluate(script, ["bg", *names])

    def luminance(colour):
        digits = colour.strip().lstrip("#")
        digits = "".join(2 * digit for digit in digits) if len(digits) == 3 else digits
        parts = [int(digits[at : at + 2], 16) / 255 for at in (0, 2, 4)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    ground, *marks = map(luminance, colours)
    ratios = [(max(ground, mark) + 0.05) / (min(ground, mark) + 0.05) for mark in marks]
    assert {name: round(ratio, 2) for name, ratio in zip(names, ratios, strict=True) if ratio < 3} == {}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_clipped_or_too_small(open_page, name, way):
    page = open_page(name, way)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    small = page.evaluate(
        """() => {
            const found = [];
            const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
            while (walker.nextNode()) {
                const box = walker.currentNode.parentElement;
                if (!walker.currentNode.data.trim() || !box.checkVisibility() || box.closest("title,desc")) continue;
                const scale = box.ownerSVGElement ? box.ownerSVGElement.getScreenCTM().a : 1;
                const size = parseFloat(getComputedStyle(box).fontSize) * scale;
                if (size < 10.95) found.push([walker.currentNode.data.trim().slice(0, 40), size]);
            }
            return found;
        }"""
    )
    assert small == []


@pytest.mark.parametrize("name", NAMES)
def test_a_page_asks_for_nothing(open_page, pages, name):
    page = open_page(name)
    page.mouse.wheel(0, 2000)
    assert page.seen == [f"file://{pages[name]}"]


@pytest.mark.parametrize("name", NAMES)
def test_without_scripts_a_page_lacks_nothing_but_tools(open_page, name):
    rows = "[...document.querySelectorAll('tbody tr')].filter(row => row.checkVisibility()).length"
    page = open_page(name, scripts=False)
    assert page.locator(".js-only:visible").count() == 0
    charts = page.locator("svg[role=img]")
    assert charts.count() == open_page(name).locator("svg[role=img]").count()
    assert all(charts.nth(place).locator("rect, path, polyline, line").count() for place in range(charts.count()))
    with_scripts = open_page(name)
    with_scripts.evaluate("document.querySelectorAll('details').forEach(box => { box.open = true; })")
    shown = with_scripts.evaluate(rows)
    folded = with_scripts.locator("tr.more").count()
    assert page.locator("tbody tr").count() == shown + folded


def test_print_opens_everything(open_page):
    page = open_page("plan", "print")
    assert page.locator("tr.more").count() > 0
    assert page.evaluate("[...document.querySelectorAll('tr.more, details td')].every(cell => cell.checkVisibility())")
    assert page.locator("button.tool:visible, select:visible, input:visible").count() == 0


def test_a_timeline_is_explored_by_keyboard(open_page):
    page = open_page("analysis")
    chart = page.locator("[aria-labelledby=chart-timeline-t]")
    boxes = "document.querySelectorAll('[aria-labelledby=chart-timeline-t] rect').length"
    whole = page.evaluate(boxes)
    chart.focus()
    for _ in range(4):
        page.keyboard.press("+")
    assert 0 < page.evaluate(boxes) < whole
    page.keyboard.press("0")
    assert page.evaluate(boxes) == whole
    page.keyboard.press(".")
    told = page.locator("output").inner_text()
    assert told.startswith("rank 3, compute: compute, ")
    page.get_by_label("parameter").uncheck()
    assert page.locator("[aria-labelledby=chart-timeline-t] rect.s-parameter").count() == 0
    page.get_by_label("beside it").select_option("")
    assert page.locator("[aria-labelledby=chart-timeline-t] text.rank").count() == 0
    assert page.evaluate(boxes) < whole


def test_a_timeline_shows_the_rank_that_is_waited_for(open_page):
    """Rank 11 of that run computes longer than all others, as its truth.json says."""
    page = open_page("analysis", scripts=False)
    assert page.locator("h2:has-text('which it waits for')").inner_text().startswith("One step of rank ")
    assert page.locator("[aria-labelledby=chart-timeline-t] text.rank").all_text_contents()[1] == "rank 11"


def test_sliders_tell_what_the_table_tells(open_page):
    page = open_page("plan")
    rows = page.locator("#table-scenarios tbody tr")
    texts = {
        row[0]: row for row in (rows.nth(place).locator("td").all_text_contents() for place in range(rows.count()))
    }
    told = page.locator("#scenario-told")

    def speed(row):
        return row[3].removesuffix("x")

    assert f"speed-up {speed(texts['as it is'])}x" in told.inner_text()
    slider = page.locator("#scenario-tools input").first
    slider.focus()
    page.keyboard.press("ArrowRight")
    (row,) = [row for name, row in texts.items() if name == "nodes: 8"]
    assert f"speed-up {speed(row)}x" in told.inner_text()
    assert row[1] in told.inner_text()


def test_a_folded_table_opens(open_page):
    page = open_page("plan")
    rows = page.locator("#table-alternatives tbody tr:visible")
    assert rows.count() == 5
    page.locator("[data-more=table-alternatives]").click()
    assert rows.count() > 10


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", NAMES)
def test_pages_look_as_they_did(open_page, browser, name, way):
    from PIL import Image

    page = open_page(name, way)
    picture = Image.open(io.BytesIO(page.screenshot(full_page=True))).convert("L")
    small = picture.resize((PICTURE_WIDTH, max(1, round(picture.height * PICTURE_WIDTH / picture.width))))
    kept = PICTURES / f"{name.replace(' ', '_')}.{way}.png"
    made_with = PICTURES / "made_with.json"
    here = {"chromium": browser.version.split(".")[0], "font": _font(page)}
    if os.environ.get("PARO_ADVISE_NEW_PICTURES"):
        small.quantize(16).save(kept, optimize=True)
        made_with.write_text(json.dumps(here, sort_keys=True) + "\n")
    if here != json.loads(made_with.read_text()):
        pytest.skip(f"the pictures were made with {made_with.read_text().strip()}, this is {json.dumps(here)}")
    known = Image.open(kept).convert("L")
    assert abs(known.height - small.height) <= 0.03 * known.height + BLOCK
    differs = _different(known, small)
    assert sum(differs.values()) <= MOST_BLOCKS, differs
    empty = Image.new("L", small.size, _paper(small))
    assert sum(_different(known, empty).values()) > MOST_BLOCKS


def _font(page):
    """Return which font the page is drawn with."""
    client = page.context.new_cdp_session(page)
    for domain in ("DOM", "CSS"):
        client.send(f"{domain}.enable")
    root = client.send("DOM.getDocument")["root"]["nodeId"]
    node = client.send("DOM.querySelector", {"nodeId": root, "selector": "#verdict"})["nodeId"]
    return client.send("CSS.getPlatformFontsForNode", {"nodeId": node})["fonts"][0]["familyName"]


def _paper(picture):
    """Return the shade that most of a picture has."""
    histogram = picture.histogram()
    return histogram.index(max(histogram))


def _different(known, seen):
    """Return where a page looks different: the place of a row of blocks in the known picture, and its share.

    Shares are of the blocks that are drawn upon in either picture. A row may stand up to a block higher or lower: a
    line that breaks elsewhere moves all that follows.
    """
    import numpy as np

    count = min(known.height, seen.height) // BLOCK
    papers = _paper(known), _paper(seen)
    known, seen = (np.asarray(picture, dtype=float) for picture in (known, seen))

    def means(rows):
        return rows.reshape(BLOCK, PICTURE_WIDTH // BLOCK, BLOCK).mean(axis=(0, 2))

    def differing(top):
        wanted = means(known[top : top + BLOCK])
        places = range(max(0, top - BLOCK), min(top, len(seen) - 2 * BLOCK) + BLOCK + 1)
        return min(int((np.abs(wanted - means(seen[place : place + BLOCK])) > SEEN).sum()) for place in places)

    def drawn(top):
        rows = zip((known, seen), papers, strict=True)
        marks = [np.abs(means(picture[top : top + BLOCK]) - paper) > DRAWN for picture, paper in rows]
        return int((marks[0] | marks[1]).sum())

    tops = range(0, count * BLOCK, BLOCK)
    total = max(1, sum(map(drawn, tops)))
    shares = {top: differing(top) / total for top in tops}
    return {top: share for top, share in shares.items() if share}
