"""The HTML report in Chromium: driven by mouse and keys, measured for overlap and contrast, safe with hostile texts.

Skipped where there is no Chromium (Debian: chromium, chromium-driver) or no selenium.
"""

import struct
from base64 import b64decode
from pathlib import Path
from shutil import which

import pytest

from eagle3_infer.html import write_html
from oracles.reports import FULL, HOSTILE, ROUNDS, TEXTS, TOKENS, drafting_modes, report_of, told_of

webdriver = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install '.[dev]'")
CHROMIUM, DRIVER = which("chromium"), which("chromedriver")
pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="no chromium and chromedriver: apt-get install chromium chromium-driver"
)
FLAGS = (
    "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run",
    "--disable-background-networking", "--disable-component-update", "--disable-sync", "--disable-dev-shm-usage",
)  # fmt: skip
SIZES = [(1280, "light"), (1280, "dark"), (400, "light"), (400, "dark")]
ORACLES = Path(__file__).parents[1] / "oracles"
OVERLAPS, CONTRASTS = ((ORACLES / f"page_{name}.js").read_text("utf-8") for name in ("overlaps", "contrasts"))


@pytest.fixture(scope="module")
def browser(tmp_path_factory):
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for option in (*FLAGS, f"--user-data-dir={tmp_path_factory.mktemp('chromium')}"):
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=webdriver.ChromeService(DRIVER))
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def page(tmp_path_factory):
    """Every mode, two replies; tokens, names and the question are hostile."""
    modes = drafting_modes(category=HOSTILE)
    told = told_of(modes, asked=f"{HOSTILE}\nשלום?")
    second = dict(told.replies[0]) | {"id": "b", "modes": {"plain": told.replies[0]["modes"]["plain"]}}
    told.replies.append(second)
    path = tmp_path_factory.mktemp("page") / "page.html"
    write_html(report_of(modes, argv=[HOSTILE], notes=[HOSTILE]), told, path)
    return path.as_uri()


def open_page(browser, page, width=1280, scheme="light"):
    metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": False}
    browser.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", metrics)
    media = {"features": [{"name": "prefers-color-scheme", "value": scheme}]}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", media)
    browser.get(page)


def find(browser, selector):
    return browser.find_elements("css selector", selector)


def press(browser, what, name):
    (button,) = [b for b in find(browser, f'.pick[aria-label="{what}"] button') if b.text.startswith(name)]
    button.click()


def keys(browser, key):
    browser.switch_to.active_element.send_keys(getattr(webdriver.Keys, key))


def told(browser):
    (line,) = find(browser, ".told")
    return line.text


@pytest.mark.parametrize("width, scheme", SIZES)
def test_nothing_overlaps_and_everything_can_be_read(browser, page, width, scheme, tmp_path):
    open_page(browser, page, width, scheme)
    press(browser, "Mode", "tree")
    for details in find(browser, "details"):
        browser.execute_script("arguments[0].open = true", details)
    assert browser.execute_script("return document.documentElement.scrollWidth") <= width
    assert browser.execute_script(OVERLAPS) == []
    assert browser.execute_script(CONTRASTS) == []
    picture = b64decode(browser.execute_cdp_cmd("Page.captureScreenshot", {"format": "png"})["data"])
    (tmp_path / "page.png").write_bytes(picture)
    assert struct.unpack(">2I", picture[16:24]) == (width, 900) and len(picture) > 15_000


def test_the_measures_can_fail(browser, page):
    open_page(browser, page)
    spoil = "document.head.append(Object.assign(document.createElement('style'), {textContent: arguments[0]}))"
    browser.execute_script(spoil, ".bar { margin-bottom: -20px }")
    assert len(browser.execute_script(OVERLAPS)) > 5
    open_page(browser, page)
    browser.execute_script(spoil, ".node rect { width: 60px } .counts { color: #ccc } .node text { fill: #ddd }")
    assert any("leaves its box" in pair or "its score" in pair for pair in browser.execute_script(OVERLAPS))
    assert {"counts", "node"} <= {words.split()[0] for _, words in browser.execute_script(CONTRASTS)}


def test_it_runs_alone(browser, page):
    """No error on the console, nothing fetched, and no hostile text that ran."""
    open_page(browser, page)
    assert browser.get_log("browser") == []
    assert browser.execute_script("return performance.getEntriesByType('resource').length") == 0
    assert browser.execute_script("return window.hacked") is None
    assert find(browser, "img") == [] and len(find(browser, "script")) == 2


def test_modes_replies_and_rounds(browser, page):
    open_page(browser, page)
    press(browser, "Mode", "tree")
    # what a user copies is the text, with marks at line ends and names for what has no glyph
    shown = browser.execute_script("return document.querySelector('.reply').textContent")
    clean = "".join(TEXTS[token] for token in TOKENS).replace("\u202e", "[U+202E]").replace("\0", "[U+0000]")
    assert shown == clean.replace("\n", "⏎\n")
    rounds = find(browser, ".reply .round")
    assert [len(find(r, ".tok")) for r in rounds] == [len(r.emitted) for r in ROUNDS]
    assert [[t.get_attribute("class") for t in find(r, ".tok")] for r in rounds[:2]] == [
        ["tok n1", "tok n2", "tok own"], ["tok n1", "tok own"],
    ]  # fmt: skip
    # the longest accepted path is shown first
    assert rounds[0].get_attribute("aria-selected") == "true"
    rounds[2].click()
    assert "drafted nothing" in find(browser, "#round .counts")[0].text and len(find(browser, ".node")) == 2
    rounds[4].click()
    assert [n.get_attribute("class") for n in find(browser, ".node")] == [
        "node root", "node taken", "node refused", "node refused", "node refused", "node unreached",
    ]  # fmt: skip
    press(browser, "Mode", "HF generate")
    assert find(browser, ".tree") == [] and len(find(browser, ".reply .own")) == len(TOKENS) - 1
    press(browser, "Reply", "b")
    assert [b.text for b in find(browser, '.pick[aria-label="Mode"] button')] == ["plain"]
    assert browser.get_log("browser") == []


def test_a_tree_by_hand(browser, page):
    open_page(browser, page)
    press(browser, "Mode", "tree")
    nodes = find(browser, ".node")
    fates = [node.get_attribute("class").split()[1] for node in nodes]
    assert fates == ["root", "taken", "refused", "refused", "taken", "unreached", "own"]
    assert len(find(browser, "#round tbody tr")) == len(nodes) == len(FULL.tokens) + 1
    labels = [node.get_attribute("aria-label") for node in nodes]
    assert "draft score 0.368 · whole path 0.333" in labels[4] and "accepted at level 2" in labels[4]
    assert labels[3].endswith("refused: the target chose “\u2068␣مرحبا\u2069” here") and "🙂" in labels[6]
    # columns are levels; what was emitted is the top line; no two nodes share a place
    at = [(n.rect["x"], n.rect["y"]) for n in find(browser, ".node rect")]
    assert at[1][0] == at[2][0] < at[3][0] == at[4][0] < at[6][0] and at[0][0] < at[1][0]
    assert at[0][1] == at[1][1] == at[4][1] == at[6][1] < at[3][1] < at[2][1] == at[5][1]
    assert len(set(at)) == len(at)


def test_hovering_a_node_tells_of_it(browser, page):
    open_page(browser, page)
    press(browser, "Mode", "tree")
    chains = webdriver.ActionChains(browser)
    chains.move_to_element(find(browser, ".node rect")[3]).perform()
    assert "שלום" in told(browser) and "level 2" in told(browser) and "refused" in told(browser)


def test_keys_reach_everything(browser, page):
    open_page(browser, page)
    press(browser, "Mode", "tree")
    browser.execute_script("document.querySelector('.round[tabindex=\"0\"]').focus()")
    keys(browser, "ARROW_RIGHT")
    keys(browser, "END")
    keys(browser, "ARROW_LEFT")
    keys(browser, "ARROW_LEFT")
    assert find(browser, "#round h3")[0].text == "Round 3 of 5"
    keys(browser, "HOME")
    assert find(browser, '.round[tabindex="0"]')[0].get_attribute("data-round") == "0"
    browser.execute_script("document.querySelector('.node[tabindex=\"0\"]').focus()")
    for key, expected in (
        ("ARROW_RIGHT", "accepted at level 1"),
        ("ARROW_DOWN", "level 1"),
        ("ARROW_UP", "accepted at level 1"),
        ("ARROW_RIGHT", "accepted at level 2"),
        ("ARROW_DOWN", "refused"),
        ("ARROW_LEFT", "accepted at level 1"),
        ("HOME", "root"),
    ):
        keys(browser, key)
        assert expected in told(browser), key
    later = find(browser, '#round button[data-by="1"]')[0]
    later.send_keys(webdriver.Keys.ENTER)
    assert find(browser, "#round h3")[0].text == "Round 2 of 5"
    assert browser.switch_to.active_element.text == "later →"
