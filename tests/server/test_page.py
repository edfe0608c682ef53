"""The page at / in a real browser: Debian's Chromium, headless, against a real server."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.http_server import eventually, running
from support.served import Served

from winnow.server.settings import ServerConfig

playwright = pytest.importorskip("playwright.sync_api")

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]
PHONE = {"width": 390, "height": 844}
DESK = {"width": 1280, "height": 800}
SCREENSHOTS = Path(__file__).parents[2] / "build" / "screenshots"

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    with playwright.sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def page(browser: Any) -> Iterator[Any]:
    """A new tab; it must not complain, nor ask anyone but its server for anything."""
    context = browser.new_context(viewport=DESK)
    context.set_default_timeout(30_000)
    page = context.new_page()
    complaints: list[str] = []
    asked: set[str] = set()
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on(
        "console",
        lambda message: complaints.append(message.text) if "Security" in message.text else None,
    )
    page.on("request", lambda request: asked.add(request.url))
    yield page
    context.close()
    assert not complaints
    assert all(re.match(r"(http://127\.0\.0\.1:\d+/|data:)", url) for url in asked)


def ask(page: Any, text: str, tokens: int) -> Any:
    """Send a message; where its answer will be."""
    page.fill("#max-tokens", str(tokens))
    page.fill("#prompt", text)
    page.press("#prompt", "Enter")
    return page.locator(".turn.assistant").last


def keep(page: Any, name: str) -> None:
    SCREENSHOTS.mkdir(parents=True, exist_ok=True)
    page.screenshot(path=os.fspath(SCREENSHOTS / f"{name}.png"))


def test_a_chat_streams_in_and_the_gauges_move(page: Any, served_tiny: Served) -> None:
    page.goto(served_tiny.url)
    page.wait_for_selector("#state.ready")
    assert page.text_content("#model") == "tiny"
    page.select_option("#thinking", "disabled")
    answer = ask(page, "Tell me about grain.", 6000)
    text = answer.locator(".text")
    first = eventually(lambda: text.text_content())
    eventually(lambda: len(text.text_content()) > len(first))
    for gauge in ("running", "pages", "rate"):
        eventually(lambda gauge=gauge: page.text_content(f"#{gauge}") != "0")
    assert page.is_visible("#stop")
    keep(page, "desk")
    page.click("#stop")
    page.wait_for_selector(".turn.assistant:not(.busy)")
    answer = ask(page, "And of chaff.", 8)
    page.wait_for_selector(".turn.assistant:not(.busy) >> nth=1")
    assert re.match(r"8 tokens", answer.locator(".note").text_content())
    eventually(lambda: page.text_content("#pages") == "0")


def test_stop_ends_the_answer_and_frees_its_pages(page: Any, served_tiny: Served) -> None:
    page.goto(served_tiny.url)
    page.wait_for_selector("#state.ready")
    answer = ask(page, "Count for ever.", 4000)
    page.click("#stop")
    page.wait_for_selector(".turn.assistant:not(.busy)")
    assert answer.locator(".note").text_content() == "stopped"
    assert page.is_visible("#send")
    assert served_tiny.idle_metrics()["winnow_pages_used"] == 0


def test_reasoning_is_folded_and_code_is_set_apart(page: Any) -> None:
    with running() as server:
        server.engine.script = ["<mm:think>", "hidden ", "thought", "</mm:think>", "See:\n```py\n",
                                "x < 1\n```\n", "<b>done</b>"]  # fmt: skip
        page.goto(server.url)
        answer = ask(page, "Think.", 7)
        page.wait_for_selector(".turn.assistant:not(.busy)")
        assert not answer.locator(".thought").is_visible()
        answer.locator("summary").click()
        assert answer.locator(".thought").text_content() == "hidden thought"
        assert answer.locator("pre").text_content() == "x < 1"
        assert answer.locator(".text").text_content().endswith("<b>done</b>")
        with page.expect_request("**/v1/chat/completions") as request:
            ask(page, "More.", 1)
        roles = [m["role"] for m in request.value.post_data_json["messages"]]
        assert roles == ["user", "assistant", "user"]
        page.click("#new")
        assert page.locator(".turn").count() == 0


def test_a_refusal_is_shown_and_the_question_is_not_sent_again(page: Any) -> None:
    with running() as server:
        page.goto(server.url)
        answer = ask(page, "x" * 6000, 10)
        page.wait_for_selector(".turn.assistant:not(.busy)")
        assert "shorten the prompt" in answer.locator(".note.error").text_content()
        ask(page, "short", 2)
        page.wait_for_selector(".turn.assistant:not(.busy) .note:text('2 tokens')")


def test_a_closed_server_is_asked_with_the_key_that_was_typed(page: Any) -> None:
    with running(ServerConfig(api_keys=("right",))) as server:
        page.goto(server.url)
        page.fill("#key", "wrong")
        page.press("#key", "Enter")
        page.wait_for_selector("#key-error:visible")
        page.fill("#key", "right")
        page.press("#key", "Enter")
        page.wait_for_selector("#state.ready")
        ask(page, "hello", 2)
        page.wait_for_selector(".turn.assistant:not(.busy) .note:text('2 tokens')")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_cut_off_on_a_phone(browser: Any, scheme: str) -> None:
    context = browser.new_context(viewport=PHONE, color_scheme=scheme)
    page = context.new_page()
    with running() as server:
        page.goto(server.url)
        page.wait_for_selector("#state.ready")
        ask(page, "hello " * 30, 60)
        page.wait_for_selector(".turn.assistant:not(.busy)")
        keep(page, f"phone-{scheme}")
        width = page.evaluate("document.documentElement.scrollWidth")
        assert width <= PHONE["width"]
        for name in ("#prompt", "#send", "#running", "#rate", "#pages", "#new"):
            box = page.locator(name).bounding_box()
            assert box["x"] >= 0
            assert box["x"] + box["width"] <= PHONE["width"]
            assert box["y"] + box["height"] <= PHONE["height"]
    context.close()
