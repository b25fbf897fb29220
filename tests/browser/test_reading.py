"""The page can be read: on a phone, in the dark, and by who cannot see faint grey."""

from __future__ import annotations

import pytest
from playwright.sync_api import Browser, Page, expect

from tests.browser.test_page import FIRST, SECOND, ask

pytestmark = pytest.mark.slow

# The least contrast of a page's visible text, by WCAG's formula, and where it is.
CONTRAST = """() => {
  const context = new OffscreenCanvas(1, 1).getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    context.clearRect(0, 0, 1, 1);
    context.fillStyle = colour;
    context.fillRect(0, 0, 1, 1);
    return [...context.getImageData(0, 0, 1, 1).data];
  };
  const light = ([r, g, b]) => [r, g, b]
    .map((v) => v / 255)
    .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4))
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const behind = (node) => {
    for (let at = node; at; at = at.parentElement) {
      const colour = rgba(getComputedStyle(at).backgroundColor);
      if (colour[3] === 255) return colour;
    }
    return rgba("Canvas");
  };
  const found = [];
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walk.nextNode()) {
    const node = walk.currentNode.parentElement;
    if (!walk.currentNode.data.trim() || !node.checkVisibility()) continue;
    const style = getComputedStyle(node);
    const ink = node instanceof SVGElement ? style.fill : style.color;
    const [a, b] = [light(rgba(ink)), light(behind(node))].sort((x, y) => y - x);
    found.push([(a + 0.05) / (b + 0.05), walk.currentNode.data.trim()]);
  }
  return found.sort((x, y) => x[0] - y[0]);
}"""


def fill(page: Page, url: str) -> None:
    """Make every part of the page visible."""
    ask(page, url, FIRST)
    ask(page, url, FIRST)
    ask(page, url, SECOND)
    page.goto(url)
    page.locator(".key-name").first.click()
    page.get_by_role("button", name="Pin", exact=True).click()
    page.locator(".why").first.click()
    page.locator("#marks summary").click()
    expect(page.locator(".explanation li").first).to_be_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_all_text_stands_out(browser: Browser, url: str, scheme: str) -> None:
    dark = scheme == "dark"
    with browser.new_context(color_scheme="dark" if dark else "light") as context:
        page = context.new_page()
        fill(page, url)
        page.get_by_role("button", name="Remove all").click()
        contrasts = page.evaluate(CONTRAST)
        assert len(contrasts) > 40
        assert contrasts[0][0] >= 4.5, contrasts[0]
        ground = page.evaluate("getComputedStyle(document.body).backgroundColor")
        assert (ground == "rgb(18, 19, 22)") == dark


@pytest.mark.parametrize("width", [360, 390, 768, 1280])
def test_nothing_is_cut_off(browser: Browser, url: str, width: int) -> None:
    with browser.new_context(viewport={"width": width, "height": 844}) as context:
        page = context.new_page()
        page.goto(url)
        expect(page.locator("#welcome")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= width
        fill(page, url)
        assert page.evaluate("document.documentElement.scrollWidth") <= width


def test_what_can_be_pressed_is_large_enough_for_a_thumb(browser: Browser, url: str) -> None:
    with browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True) as context:
        page = context.new_page()
        fill(page, url)
        heights = page.locator("button:visible").evaluate_all(
            "nodes => nodes.map((node) => node.getBoundingClientRect().height)"
        )
        assert min(heights) >= 32


def test_what_can_be_pressed_or_filled_has_a_name(browser: Browser, url: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        fill(page, url)
        unnamed = page.locator("button:visible, input:visible, [role=img]").evaluate_all(
            """nodes => nodes.filter((node) =>
                !(node.textContent.trim() || node.ariaLabel || node.labels?.length)
            ).map((node) => node.outerHTML)"""
        )
        assert unnamed == []
        assert page.locator("svg:not([role=img]):not([aria-hidden=true])").count() == 0


def test_a_page_that_nobody_sees_asks_less(browser: Browser, url: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.clock.install()
        page.add_init_script(
            "Object.defineProperty(document, 'hidden', { get: () => window.away ?? false })"
        )
        page.goto(url)
        expect(page.locator("#status")).to_have_attribute("data-state", "live")
        page.clock.pause_at(page.evaluate("Date.now() + 500"))
        with page.expect_response("**/pool"):
            page.clock.run_for(1_000)
        with page.expect_response("**/pool"):
            page.evaluate(
                "window.away = true; document.dispatchEvent(new Event('visibilitychange'))"
            )
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.clock.run_for(14_000)
        page.wait_for_timeout(200)
        assert asked == []
        with page.expect_response("**/pool"):
            page.clock.run_for(2_000)
        with page.expect_response("**/pool"):
            page.evaluate(
                "window.away = false; document.dispatchEvent(new Event('visibilitychange'))"
            )


def test_a_key_within_the_address_does_not_stop_the_page(browser: Browser, url: str) -> None:
    with browser.new_context() as context:
        page = context.new_page()
        page.goto(url.replace("://", "://any:secret@"))
        expect(page.locator("#status")).to_have_attribute("data-state", "live")
        expect(page.locator("#curl")).to_contain_text(f"curl {url}/v1")
