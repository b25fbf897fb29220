"""A headless Chromium, and a server whose page it clicks through."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import NoReturn

import pytest

pytest.importorskip("playwright.sync_api", reason="needs pip install playwright")
pytest.importorskip("torch", reason="needs pip install '.[server]'")
pytest.importorskip("uvicorn", reason="needs pip install '.[server]'")

from playwright.sync_api import Browser, Error, Page, Playwright, expect, sync_playwright

from tests.server.world import serve

expect.set_options(timeout=30_000)  # a busy machine draws late; what is right comes at once

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
QUIET = (
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--no-first-run",
)


def find_chromium(driver: Playwright) -> str | None:
    """The path of Playwright's own Chromium, else of one on PATH, else None."""
    own = driver.chromium.executable_path
    if Path(own).is_file():
        return own
    return next((path for name in NAMES if (path := shutil.which(name))), None)


def give_up(why: str) -> NoReturn:
    """Skip, saying why; fail where scripts/test was told to use a browser."""
    if os.environ.get("NINFER_POOL_BROWSER") == "required":
        pytest.fail(why)
    pytest.skip(f"{why}: scripts/test --browser installs one and runs these")


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    """One browser for a module's tests: its driver lets no other event loop run meanwhile."""
    with sync_playwright() as driver:
        path = find_chromium(driver)
        if path is None:
            give_up("no Chromium here")
        try:
            browser = driver.chromium.launch(executable_path=path, args=QUIET)
        except Error as error:
            give_up(f"{path} does not start ({str(error).splitlines()[0]})")
        yield browser
        browser.close()


@pytest.fixture
def url() -> Iterator[str]:
    """The address of a server that nobody has asked anything yet."""
    with serve(lanes=2) as server:
        yield server.url


@pytest.fixture
def page(browser: Browser, url: str) -> Iterator[Page]:
    """The server's page, open; at the end nothing was complained about, or asked of others."""
    context = browser.new_context(viewport={"width": 1280, "height": 900})
    page = context.new_page()
    complaints: list[str] = []
    asked: list[str] = []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type == "error" else None)
    page.on("request", lambda request: asked.append(request.url))
    page.goto(url)
    yield page
    context.close()
    assert not [text for text in complaints if "Failed to load resource" not in text]
    assert asked
    assert not [address for address in asked if not address.startswith(url + "/")]
