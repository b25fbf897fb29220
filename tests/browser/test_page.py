"""The page says what `GET /pool` says, and its buttons do what they say."""

from __future__ import annotations

import re
from typing import Any
from urllib.parse import quote

import pytest
from playwright.sync_api import Locator, Page, expect

pytestmark = pytest.mark.slow

Json = dict[str, Any]
FIRST, SECOND = "What is a frontier of a hybrid model?", "Name three rivers in Europe, please."


def ask(page: Page, url: str, *turns: str, salt: str | None = None) -> None:
    """Send one chat request, as any client would."""
    roles = ("user", "assistant")
    messages = [{"role": roles[i % 2], "content": turn} for i, turn in enumerate(turns)]
    body: Json = {"messages": messages, "max_tokens": 4}
    if salt is not None:
        body["cache_salt"] = salt
    answer = page.request.post(f"{url}/v1/chat/completions", data=body, timeout=60_000)
    assert answer.ok, answer.text()


def pool(page: Page, url: str, *, salt: str | None = None) -> Json:
    """What the page is told."""
    query = f"?cache_salt={quote(salt)}" if salt else ""
    said: Json = page.request.get(f"{url}/pool{query}").json()
    return said


def entries(page: Page) -> Locator:
    return page.locator("#entry-list > li")


def requests(page: Page) -> Locator:
    return page.locator("#request-rows > tr:not(.facts)")


def look_again(page: Page) -> None:
    """Wait until the page has drawn what it is told from now on."""
    for _ in range(2):  # the second answer comes when the first is drawn
        page.wait_for_event(
            "response", lambda answer: answer.url.partition("?")[0].endswith("/pool")
        )


def open_entry(page: Page, key: str) -> Locator:
    row = page.locator(f"#entry-list > li[data-key='{key}']")
    row.get_by_role("button", name=key[:8]).click()
    return row


def test_an_empty_pool_says_how_to_send_a_first_request(page: Page, url: str) -> None:
    expect(page.get_by_role("heading", name="No requests yet")).to_be_visible()
    expect(page.locator("#curl")).to_contain_text(f"curl {url}/v1/chat/completions")
    expect(page.locator("#entries-empty")).to_be_visible()
    expect(page.locator("#requests-empty")).to_be_visible()
    expect(page.locator("#status")).to_have_text(re.compile("live"))
    ask(page, url, FIRST)
    expect(page.locator("#welcome")).to_be_hidden()
    expect(entries(page)).to_have_count(1)


def test_what_is_shown_is_what_the_pool_says(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    ask(page, url, FIRST)
    ask(page, url, SECOND)
    expect(requests(page)).to_have_count(3)
    said = pool(page, url)
    expect(entries(page)).to_have_count(len(said["entries"]))
    expect(page.locator("#lanes > li")).to_have_count(len(said["lanes"]))
    expect(page.locator("#model")).to_have_text(said["model"])
    for row, request in zip(requests(page).all(), said["requests"], strict=True):
        expect(row.locator("th")).to_have_text(str(request["request"]))
        expect(row.locator(".reused-cell b")).to_have_text(f"{request['cached_tokens']:,}")
    totals = said["totals"]
    shown = f"{totals['cached_tokens']:,} of {totals['prompt_tokens']:,}"
    expect(page.locator("#figures")).to_contain_text(shown)
    expect(page.locator("#rate-note")).to_have_text("3 requests drawn")
    rate = 100 * totals["cached_tokens"] / totals["prompt_tokens"]
    expect(page.locator("#rate-legend")).to_contain_text(f"since the start{rate:.1f} %")
    page.locator("#rate .u-over").hover()  # the request in the middle
    _, prompt, cached = said["history"][1]
    expect(page.locator("#rate-legend")).to_contain_text(f": {cached:,} of {prompt:,}")
    for entry in said["entries"]:
        row = page.locator(f"#entry-list > li[data-key='{entry['key']}']")
        expect(row).to_contain_text(f"{entry['tokens']:,} tokens")
        expect(row.locator("svg.length .mark")).to_have_count(len(entry["checkpoints"]))
        faint = [point for point in entry["checkpoints"] if point["superseded"]]
        expect(row.locator("svg.length .superseded .mark")).to_have_count(len(faint))


def test_a_reason_says_what_it_means(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    why = requests(page).first.get_by_role("button", name="new prompt")
    expect(why).to_have_attribute("aria-expanded", "false")
    why.click()
    expect(why).to_have_attribute("aria-expanded", "true")
    facts = page.locator("#request-rows > tr.facts").first
    expect(facts).to_contain_text("Nothing retained begins like this prompt")
    expect(facts).to_contain_text("What helps:")
    look_again(page)  # leaves open what is open
    expect(facts).to_be_visible()


def test_an_entry_explains_itself_and_is_pinned_and_removed(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    ask(page, url, SECOND)
    expect(entries(page)).to_have_count(2)
    key = pool(page, url)["entries"][0]["key"]
    row = open_entry(page, key)
    explained = page.request.get(f"{url}/pool/entries/{key}").json()["explanation"]
    assert explained
    expect(row.locator(".explanation li")).to_have_count(len(explained))
    row.get_by_role("button", name="Pin", exact=True).click()
    expect(row.locator(".badge.pinned")).to_be_visible()
    assert page.request.get(f"{url}/pool/entries/{key}").json()["entry"]["pinned"]
    row.get_by_role("button", name="Unpin").click()
    expect(row.locator(".badge.pinned")).to_have_count(0)
    row.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Keep").click()
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert len(pool(page, url)["entries"]) == 2
    row.get_by_role("button", name="Remove").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(entries(page)).to_have_count(1)
    assert key not in [entry["key"] for entry in pool(page, url)["entries"]]


def test_escape_removes_nothing_and_remove_all_removes_all(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    ask(page, url, SECOND)
    page.get_by_role("button", name="Remove all").click()
    page.keyboard.press("Escape")
    expect(page.get_by_role("dialog")).to_have_count(0)
    assert len(pool(page, url)["entries"]) == 2
    page.get_by_role("button", name="Remove all").click()
    page.get_by_role("dialog").get_by_role("button", name="Remove").click()
    expect(page.locator("#entries-empty")).to_be_visible()
    assert pool(page, url)["entries"] == []


def test_an_entry_is_opened_from_the_keyboard(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    button = entries(page).first.locator(".key-name")
    button.wait_for()
    page.locator("#salt").focus()
    for _ in range(12):
        page.keyboard.press("Tab")
        if button.evaluate("node => node === document.activeElement"):
            break
    expect(button).to_be_focused()
    page.keyboard.press("Enter")
    expect(button).to_have_attribute("aria-expanded", "true")
    look_again(page)  # does not take the focus away
    expect(button).to_be_focused()


def test_a_salt_shows_its_tenant_alone(page: Page, url: str) -> None:
    ask(page, url, FIRST, salt="blue & green")
    ask(page, url, SECOND)
    open_key = pool(page, url)["entries"][0]["key"]
    secret_key = pool(page, url, salt="blue & green")["entries"][0]["key"]
    expect(entries(page)).to_have_count(1)
    expect(entries(page)).to_have_attribute("data-key", open_key)
    page.get_by_label("Tenant’s salt").fill("blue & green")
    page.get_by_role("button", name="Show", exact=True).click()
    expect(entries(page)).to_have_attribute("data-key", secret_key)
    expect(requests(page)).to_have_count(1)
    row = open_entry(page, secret_key)
    expect(row.locator(".explanation li").first).to_be_visible()
    page.get_by_label("Tenant’s salt").fill("nobody")
    page.get_by_label("Tenant’s salt").press("Enter")
    expect(page.get_by_role("heading", name="No requests under this salt yet")).to_be_visible()
    expect(entries(page)).to_have_count(0)


def test_a_server_that_is_away_is_said_and_found_again(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    expect(entries(page)).to_have_count(1)
    page.route("**/pool", lambda route: route.abort())
    expect(page.locator("#banner")).to_contain_text("The server does not answer.")
    expect(page.locator("#banner")).to_contain_text("What you see is from")
    expect(page.locator("#status")).to_have_attribute("data-state", "away")
    expect(page.locator("#retry")).to_contain_text("Next try in")
    expect(entries(page)).to_have_count(1)
    page.unroute("**/pool")
    page.get_by_role("button", name="Try now").click()
    expect(page.locator("#banner")).to_be_hidden()
    expect(page.locator("#status")).to_have_attribute("data-state", "live")


@pytest.mark.parametrize(
    ("status", "message", "said"),
    [
        (401, "no key", "requires its API key"),
        (400, "cache_salt: too long", "cache_salt: too long"),
        (500, "<b>oops</b>", "<b>oops</b>"),
    ],
)
def test_a_refusal_is_said_as_text(page: Page, status: int, message: str, said: str) -> None:
    error = {"error": {"message": message}}
    page.route("**/pool", lambda route: route.fulfill(status=status, json=error))
    expect(page.locator("#banner")).to_contain_text(said)


def test_a_refused_action_is_said(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    error = {"error": {"message": "everything is pinned already"}}
    page.route("**/pin", lambda route: route.fulfill(status=409, json=error))
    row = open_entry(page, pool(page, url)["entries"][0]["key"])
    row.get_by_role("button", name="Pin", exact=True).click()
    expect(page.locator("#notice")).to_contain_text("everything is pinned already")


BUSY = {
    "lane": 0, "state": "prefill", "request": 7, "prompt_tokens": 4000, "cached_tokens": 1000,
    "position": 3000, "output_tokens": 0, "reuse": "restore_system_checkpoint",
}  # fmt: skip
ANSWERING = {**BUSY, "lane": 1, "state": "decode", "position": 4012, "output_tokens": 12}


def test_a_lane_at_work_shows_what_is_reused_computed_and_to_do(page: Page, url: str) -> None:
    said = pool(page, url) | {"lanes": [BUSY, ANSWERING], "running": 2, "queued": 3}
    page.route("**/pool", lambda route: route.fulfill(json=said))
    busy, answering = page.locator("#lanes > li").nth(0), page.locator("#lanes > li").nth(1)
    expect(busy).to_contain_text("1,000 reused, 2,000 computed, 1,000 still to do")
    expect(answering).to_contain_text("12 tokens made")
    expect(answering).to_contain_text("1,000 reused, 3,000 computed")
    expect(page.locator("#lanes-note")).to_have_text("2 of 2 at work, 3 waiting")
    widths = [
        box["width"]
        for part in ("reused", "computed", "todo")
        if (box := busy.locator(f".bar .{part}").bounding_box())
    ]
    assert widths[1] == pytest.approx(2 * widths[0], abs=2)
    assert widths[2] == pytest.approx(widths[0], abs=2)


def test_bytes_are_told_apart_by_use(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    said = pool(page, url)
    mib = 2**20
    said["entries"][0] |= {"bytes": 30 * mib, "kv_bytes": 10 * mib, "image_bytes": 20 * mib}
    said["bytes"] |= {"total": 200 * mib, "free": 120 * mib, "running": 5 * mib, "pinned": 7 * mib}
    page.route("**/pool", lambda route: route.fulfill(json=said))
    legend = page.locator("#memory-legend")
    for words in ("KV10.0 MiB", "states20.0 MiB", "running5.0 MiB", "free120 MiB", "pinned7.0 MiB"):
        expect(legend).to_contain_text(words)
    expect(legend).to_contain_text("shared or other tenants’45.0 MiB")
    expect(entries(page).first).to_contain_text("10.0 MiB KV + 20.0 MiB states")


TIER = {
    "stored": 4, "stored_bytes": 9, "images": 4, "promoted": 3, "promoted_bytes": 9,
    "dropped": 0, "failed": 0, "damaged": 0, "entries": 2, "checkpoints": 5,
}  # fmt: skip


def test_tiers_are_bars_and_entries_and_requests_name_theirs(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    said = pool(page, url)
    mib = 2**20
    expect(page.locator("#tiers")).to_be_hidden()
    said["tiers"] = [
        {"tier": "host", "bytes": 30 * mib, "budget_bytes": 120 * mib, **TIER},
        {"tier": "disk", "bytes": 5 * mib, "budget_bytes": 1024 * mib, **TIER, "damaged": 1},
    ]
    below = {"tier": "disk", "key": "d" * 32, "age_seconds": None, "idle_seconds": None}
    said["entries"].append(said["entries"][0] | below)
    said["requests"][0] |= {"tier": "disk", "cached_tokens": 9}
    page.route("**/pool", lambda route: route.fulfill(json=said))
    rows = page.locator("#tiers > li")
    expect(rows).to_have_count(3)
    expect(rows.nth(1)).to_contain_text("Host memory30.0 MiB of 120 MiB")
    expect(rows.nth(2)).to_contain_text("2 entries · 3 checkpoints brought back · 1 found damaged")
    used, bar = (rows.nth(1).locator(at).bounding_box() for at in (".bar .kv", ".bar"))
    assert used is not None
    assert bar is not None
    assert used["width"] == pytest.approx(bar["width"] / 4, abs=2)
    expect(entries(page)).to_have_count(2)
    expect(entries(page).last.locator(".badge.disk")).to_be_visible()
    expect(entries(page).last).to_contain_text("in the disk tier")
    expect(page.locator("#memory > .group")).to_have_count(1)  # the device's alone
    expect(requests(page).first).to_contain_text("from disk")


def test_many_small_entries_share_a_stretch_of_the_bar(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    said = pool(page, url)
    mib, entry = 2**20, said["entries"][0]
    large, small = (
        {"bytes": size, "kv_bytes": size // 4, "image_bytes": size * 3 // 4}
        for size in (80 * mib, mib // 8)
    )
    said["entries"] = [
        entry | (large if n == 0 else small) | {"key": f"{n:032x}", "pinned": n == 7}
        for n in range(61)
    ]
    held = 80 * mib + 60 * mib // 8
    said["bytes"] |= {"total": 200 * mib, "free": 200 * mib - held, "running": 0}
    page.route("**/pool", lambda route: route.fulfill(json=said))
    bar = page.locator("#memory")
    expect(bar.locator("> .group")).to_have_count(3)
    expect(bar.locator("> .group").nth(2)).to_have_attribute("title", re.compile("59 small"))
    whole, free = bar.bounding_box(), bar.locator("> .free").bounding_box()
    assert whole is not None
    assert free is not None
    share = (200 * mib - held) / (200 * mib)
    assert free["width"] == pytest.approx(share * whole["width"], abs=4)


def test_long_lists_are_shortened_until_asked_for(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    said = pool(page, url)
    entry, request = said["entries"][0], said["requests"][0]
    said["entries"] = [entry | {"key": f"{n:032x}", "age_seconds": n} for n in range(120)]
    said["requests"] = [request | {"request": n} for n in range(64, 0, -1)]
    page.route("**/pool", lambda route: route.fulfill(json=said))
    expect(entries(page)).to_have_count(100)
    page.get_by_role("button", name="Show all 120").click()
    expect(entries(page)).to_have_count(120)
    expect(requests(page)).to_have_count(20)
    page.get_by_role("button", name="Show older").click()
    expect(requests(page)).to_have_count(64)
    expect(requests(page).first.locator("th")).to_have_text("64")


def test_the_page_may_load_its_own_files_alone(page: Page, url: str) -> None:
    policy = page.request.get(url).headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert "://" not in policy


HOSTILE = "<img src=x onerror=alert(1)>"


def test_data_is_never_markup(page: Page, url: str) -> None:
    ask(page, url, FIRST)
    said = pool(page, url) | {"model": HOSTILE, "policy": HOSTILE}
    said["requests"][0] |= {"reason": HOSTILE, "reuse": HOSTILE, "endpoint": HOSTILE}
    said["entries"][0]["checkpoints"][0]["kind"] = HOSTILE
    page.route("**/pool", lambda route: route.fulfill(json=said))
    expect(page.locator("#model")).to_have_text(HOSTILE)
    expect(page.locator("img")).to_have_count(0)
