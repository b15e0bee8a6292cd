"""The page of `explain --html`, in a real browser: it renders, answers clicks, is quick, and shows text as text."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from selenium import webdriver
from selenium.webdriver import ActionChains
from selenium.webdriver.chrome.service import Service
from selenium.webdriver.common.by import By
from selenium.webdriver.support.ui import Select, WebDriverWait

from diff_tests.explain.explanation import explain
from diff_tests.explain.page import page_data, render
from diff_tests.run import Outcome, predict
from diff_tests.tests.explain_cases import prefix_outcome
from oracle.tests.histories import RULES
from sim.scenario import Scenario, parse

CHROMIUM, DRIVER = shutil.which("chromium"), shutil.which("chromedriver")
needs_browser = pytest.mark.skipif(
    CHROMIUM is None or DRIVER is None,
    reason="no chromium and chromedriver here; on Debian: apt-get install chromium chromium-driver",
)

EVIL = "<script>document.title='owned'</script>"
GUTTER_LEFT, GUTTER_TOP = 54, 24  # of the canvas, see page.js


def _page(outcome: Outcome) -> str:
    return render(explain(outcome, RULES, "a test"))


def _predicted(scenario: Scenario) -> Outcome:
    history = predict(scenario, RULES)
    assert history is not None
    return Outcome(scenario, "same", history, history)


def _evil_case() -> Scenario:
    steps: list[Any] = [
        {"add": {"id": EVIL, "prompt": [["</script><b>", 40]], "max_tokens": 2}},
        {"run": 9},
        {"add": {"id": "B", "prompt": [["</script><b>", 40]], "max_tokens": 2}},
        {"run": 9},
    ]
    return parse({"kvoracle": 1, "engine": {"blocks": 20}, "groups": [{"kind": "full", "block": 16}], "steps": steps})


def _large_case() -> Scenario:
    """2,000 blocks, all of them used, over 500 steps."""
    steps: list[Any] = []
    for i in range(62):
        prompt = [["sys" if i % 3 else f"s{i}", 600], [f"p{i}", 900]]
        steps += [{"add": {"id": f"req-{i}", "prompt": prompt, "max_tokens": 60}}, {"step": 8}]
    return parse(
        {
            "kvoracle": 1,
            "engine": {"blocks": 2001, "max_model_len": 4096, "max_num_batched_tokens": 2048},
            "groups": [{"kind": "full", "block": 16}, {"kind": "sliding_window", "block": 16, "window": 512}],
            "steps": [*steps, {"step": 4}],
        }
    )


# -------------------------------------------------------------------------------------------------- without a browser


def test_the_page_asks_for_nothing_over_a_network():
    page = _page(prefix_outcome())
    assert not re.search(r"""(src|href)\s*=\s*["'](?!#)""", page)
    assert not re.search(r"https?://|@import|url\(|fetch\(|XMLHttpRequest|WebSocket", page)


def test_text_from_a_scenario_never_becomes_markup():
    page = _page(_predicted(_evil_case()))
    assert EVIL not in page
    assert "</script><b>" not in page
    assert page.count("<script") == 2  # the data and the page's own


def test_the_data_rebuild_every_table_of_every_step():
    """What the script does, in Python: the changes up to a step give the tables after it."""
    explanation = explain(_predicted(_large_case()), RULES, "a test")
    data = json.loads(json.dumps(page_data(explanation)))
    tables: dict[tuple[int, int], list[int]] = {}
    changes = iter([*data["changes"], [10**9]])
    change = next(changes)
    for number, step in explanation.story.steps.items():
        while change[0] <= number:
            _, request, group, position, block, _ = change
            table = tables.setdefault((request, group), [])
            if block < 0:
                del table[position:]
            elif position < len(table):
                table[position] = block
            else:
                table.append(block)
            change = next(changes)
        rebuilt = {(data["requests"][r], g): table for (r, g), table in tables.items() if table}
        assert rebuilt == {(r, g): t for r, held in step.tables.items() for g, t in enumerate(held) if t}


# ------------------------------------------------------------------------------------------------------- in a browser


@pytest.fixture(scope="module")
def browser() -> Iterator[webdriver.Chrome]:
    options = webdriver.ChromeOptions()
    options.binary_location = CHROMIUM or ""
    for argument in ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--window-size=1400,1150"):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    driver = webdriver.Chrome(options=options, service=Service(DRIVER))
    yield driver
    driver.quit()


def _open(browser: webdriver.Chrome, page: str, folder: Path) -> None:
    """Shows a page, and waits until it is on the screen."""
    path = folder / "page.html"
    path.write_text(page, encoding="utf-8")
    browser.get_log("browser")
    browser.get(path.as_uri())
    WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.body.dataset.drawMs"))
    assert browser.get_log("browser") == []


def _click_at(browser: webdriver.Chrome, x: float, y: float) -> float:
    """Clicks at a point of the map. Milliseconds until the answer was on the screen."""
    canvas = browser.find_element(By.ID, "canvas")
    browser.execute_script("delete document.body.dataset.clickMs")
    left, top = x - canvas.size["width"] / 2, y - canvas.size["height"] / 2
    ActionChains(browser).move_to_element_with_offset(canvas, round(left), round(top)).click().perform()
    return float(WebDriverWait(browser, 30).until(lambda b: b.execute_script("return document.body.dataset.clickMs")))


def _text(browser: webdriver.Chrome, element_id: str) -> str:
    return browser.find_element(By.ID, element_id).text


@needs_browser
def test_it_opens_at_the_fault(browser: webdriver.Chrome, tmp_path: Path):
    _open(browser, _page(prefix_outcome()), tmp_path)
    assert "overwrote block 1 (position 0), which A and B share" in browser.find_element(By.TAG_NAME, "h1").text
    assert _text(browser, "block-title") == "Block 1"
    assert _text(browser, "block-state") == "In step 3: shared; A's tokens"
    assert "B hits it: tokens [0, 16) of request A; shared with A" in _text(browser, "life")
    assert "overwritten position 0, block 1 (shared with A): not expected, selected, received, written" in _text(
        browser, "tables"
    )
    assert "stayed empty position 101, block 103" in _text(browser, "tables")


@needs_browser
def test_the_map_is_drawn_in_the_colours_of_owner_and_state(browser: webdriver.Chrome, tmp_path: Path):
    _open(browser, _page(prefix_outcome()), tmp_path)
    colours = browser.execute_script(
        """
        const canvas = document.getElementById("canvas"), context = canvas.getContext("2d");
        const row = context.getImageData(0, canvas.height / 2, canvas.width, 1).data;
        return new Set(Array.from({length: canvas.width}, (_, i) => row.slice(4 * i, 4 * i + 3).join())).size;
        """
    )
    assert colours >= 4  # held, shared, cached, and what is between


@needs_browser
def test_a_click_on_a_block_shows_its_story(browser: webdriver.Chrome, tmp_path: Path):
    _open(browser, _page(_predicted(_evil_case())), tmp_path)
    _click_at(browser, GUTTER_LEFT + 5, GUTTER_TOP + 5)
    assert _text(browser, "block-title") == "Block 1"
    assert f"{EVIL} takes it for position 0: fresh, never used" in _text(browser, "life")
    assert browser.current_url.endswith("#step-1-block-1")


@needs_browser
def test_a_request_id_that_is_markup_shows_as_text(browser: webdriver.Chrome, tmp_path: Path):
    _open(browser, _page(_predicted(_evil_case())), tmp_path)
    assert EVIL in _text(browser, "timeline")
    assert EVIL in [option.text for option in Select(browser.find_element(By.ID, "request")).options]
    assert "owned" not in browser.title
    assert browser.find_elements(By.CSS_SELECTOR, "main b script, main span script, li script") == []


@needs_browser
def test_every_step_has_a_link_and_a_chip_leads_to_its_block(browser: webdriver.Chrome, tmp_path: Path):
    _open(browser, _page(prefix_outcome()), tmp_path)
    links = browser.find_elements(By.CSS_SELECTOR, "#timeline a")
    assert [link.get_dom_attribute("href") for link in links] == [f"#step-{n}" for n in range(1, 11)]
    links[0].click()
    assert _text(browser, "step-title") == "Step 1"
    assert "A admitted: 0 hit + 1620 external" in _text(browser, "step-words")
    browser.find_element(By.XPATH, "//*[@id='tables']//button[text()='7']").click()
    assert _text(browser, "block-title") == "Block 7"


@needs_browser
def test_filters_leave_the_blocks_of_a_request_and_a_group(browser: webdriver.Chrome, tmp_path: Path):
    _open(browser, _page(_predicted(_large_case())), tmp_path)
    whole = browser.execute_script("return document.getElementById('space').offsetHeight")
    Select(browser.find_element(By.ID, "request")).select_by_visible_text("req-7")
    Select(browser.find_element(By.ID, "group")).select_by_value("1")
    browser.find_element(By.ID, "only").click()
    assert browser.execute_script("return document.getElementById('space').offsetHeight") < whole / 4
    browser.execute_script("location.hash = '#step-60'")
    WebDriverWait(browser, 30).until(lambda b: _text(b, "step-title") == "Step 60")
    assert {h3.text.partition(" ")[0] for h3 in browser.find_elements(By.CSS_SELECTOR, "#tables h3")} == {"req-7,"}
    assert all("group 1" in h3.text for h3 in browser.find_elements(By.CSS_SELECTOR, "#tables h3"))


@needs_browser
def test_2000_blocks_over_500_steps_draw_in_2_s_and_answer_a_click_in_100_ms(browser: webdriver.Chrome, tmp_path: Path):
    """The best of a few, since other work may share the machine. Each click goes to another block and step."""
    page = _page(_predicted(_large_case()))
    draws, clicks = [], []
    for _ in range(3):
        _open(browser, page, tmp_path)
        draws.append(float(browser.execute_script("return document.body.dataset.drawMs")))
        clicks += [_click_at(browser, GUTTER_LEFT + 100 + 50 * i, GUTTER_TOP + 90 + 7 * i) for i in range(3)]
    assert min(draws) < 2000
    assert min(clicks) < 100
