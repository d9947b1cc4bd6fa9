"""The dashboard in a real browser: what is drawn, on a desk and on a phone, and that it is what `/metrics` says.

Pictures of each view are left in `target/dashboard`, or where KVASIR_SCREENSHOTS says.
"""

import os
from pathlib import Path

import httpx
import pytest

from browser import Browser
from conftest import Kvasir, until
from engines import Fleet

PICTURES = Path(os.environ.get("KVASIR_SCREENSHOTS") or Path(__file__).parents[2] / "target/dashboard")
VIEWS = ["overview", "fleet", "decisions", "models", "what-if", "settings"]
MARKUP = "<img src=x onerror=\"document.title='owned'\"><b>bold</b>"


@pytest.fixture(scope="module")
def browser():
    browser = Browser()
    yield browser
    browser.close()


def demo(*args):
    kvasir = Kvasir("demo", "--http-host", "127.0.0.1", "--http-port", "0", *args)
    kvasir.url = kvasir.wait_for(r"at (http://127\.0\.0\.1:\d+)").group(1)
    return kvasir


def walk(page, name, views=VIEWS):
    """Each view fits the window and has something to show; the browser has nothing to complain of."""
    for view in views:
        page.run(f"location.hash = '{view}'")
        page.until(f"document.querySelector('#nav a[aria-current]')?.hash === '#{view}'")
        page.until("document.querySelectorAll('main .card').length > 0 && !document.querySelector('main').innerText.includes('Loading.')")
        assert page.overflow() <= 0, (view, page.size)
        assert page.nameless() == [] and page.pale() == [], (view, page.nameless(), page.pale())
        assert page.run("document.querySelectorAll('h1').length") == 1, view
        page.picture(PICTURES / f"{name}-{view}-{page.size}.png", whole=view == "overview")
    assert page.complaints() == []


def test_a_newcomer_sees_where_requests_go_and_why(browser):
    kvasir = demo("--traffic", "--shadow-policy", "time")
    printed = next(line for line in kvasir.lines if "Dashboard" in line)
    assert printed.rstrip().endswith(f"{kvasir.url}/dashboard"), printed
    page = browser.open(kvasir.url)  # A browser is sent on from the address of the server.
    page.until("location.pathname === '/dashboard' && document.querySelectorAll('.decisions tbody tr').length >= 8")
    page.until("document.querySelectorAll('.shares:not(.reasons) tbody tr').length === 4")
    page.until("document.querySelector('.chart path.line.a').getAttribute('d')?.includes('L')")
    # Why they went there, without opening anything: all reasons together, and that of each.
    page.until("[...document.querySelectorAll('.reasons tbody th')].some((row) => row.innerText === 'holds more of the prompt')")
    assert page.run("[...document.querySelectorAll('.decisions tbody td:nth-child(6)')].every((cell) => cell.innerText.length > 5)")
    page.click(".decisions tbody .linklike")
    page.until("document.querySelector('.explain .why')?.innerText.length > 20")
    page.until("document.querySelectorAll('.candidates tbody tr').length === 4 && document.querySelectorAll('.candidates tr.won').length === 1")
    assert page.run("document.querySelectorAll('.candidates .piece').length") >= 4
    page.until("document.querySelector('.explain').innerText.includes('Reported as cached')")
    page.until("document.querySelector('.explain').innerText.includes('Learned of the worker')")
    page.picture(PICTURES / "why-desktop.png")
    # Keys close it, and stay where they were; the list has what a filter asks for.
    page.press("Escape")
    page.until("document.querySelector('.explain') === null && document.activeElement.getAttribute('role') === 'region'")
    page.run("(() => { const list = document.querySelector('#filter-worker'); list.selectedIndex = 2; list.dispatchEvent(new Event('change')) })()")
    page.until("document.querySelector('[role=status].soft').innerText.includes('found among those kept')")
    assert page.run("[...new Set([...document.querySelectorAll('.decisions tbody td:nth-child(3)')].map((cell) => cell.innerText))]") == ["worker 2"]
    page.run("(() => { const list = document.querySelector('#filter-outcome'); list.value = 'failed'; list.dispatchEvent(new Event('change')) })()")
    page.until("document.querySelector('main').innerText.includes('No decision that is kept fits the filter')")
    # How another policy fares beside the real one.
    page.run("location.hash = 'models'")
    page.until("document.querySelector('main').innerText.match(/time beside .*placements elsewhere/)")
    # What if caches counted for nothing? Some of these conversations would have left their worker.
    page.run("location.hash = 'what-if'")
    page.until("document.querySelector('.why').innerText.startsWith('All')")
    page.run("(() => { const slider = document.querySelector('#overlap_score_credit'); slider.value = 0; slider.dispatchEvent(new Event('input')) })()")
    page.until("document.querySelector('.why').innerText.includes('would have gone elsewhere')")
    walk(page, "traffic")
    phone = browser.open(f"{kvasir.url}/dashboard", "phone", dark=True)
    phone.until("document.querySelectorAll('.shares:not(.reasons) tbody tr').length === 4")
    walk(phone, "traffic-dark")
    # A decision that is opened far down the list is what one then sees.
    phone.run("location.hash = 'decisions'")
    phone.until("document.querySelectorAll('.decisions tbody tr').length >= 60")
    phone.run("[...document.querySelectorAll('.decisions tbody .linklike')].at(-1).scrollIntoView()")
    phone.run("[...document.querySelectorAll('.decisions tbody .linklike')].at(-1).click()")
    phone.until("document.querySelector('.explain .why') !== null")
    phone.until("(({ top }) => top > 0 && top < 200)(document.querySelector('.explain').getBoundingClientRect())")
    assert phone.run("document.activeElement.className").endswith("explain")
    phone.picture(PICTURES / "why-phone.png")
    for opened in (page, phone):
        opened.close()
    assert kvasir.stop() == 0


def figures(url):
    """Counters of the metrics page by name, summed over labels but one."""
    sums = {}
    for line in httpx.get(f"{url}/metrics", timeout=30).text.splitlines():
        if not line.startswith("#"):
            name, value = line.rsplit(" ", 1)
            status = ' failed' if 'status="error"' in name else ""
            key = name.split("{")[0] + status
            sums[key] = sums.get(key, 0) + float(value)
    return sums


def test_figures_equal_the_metrics_page_and_names_are_shown_as_text(browser):
    kvasir = demo("--model-name", MARKUP, "--workers", "1")
    ask = {"model": MARKUP, "messages": [{"role": "user", "content": "How long is the way to the depot, by foot?"}], "stream": True}
    with httpx.Client(base_url=kvasir.url, timeout=30) as http:
        for _ in range(3):
            http.post("/v1/chat/completions", json=ask, headers={"x-request-id": MARKUP}).raise_for_status()
        assert http.post("/v1/chat/completions", json={**ask, "model": "nobody"}).status_code == 404
    told = until(lambda: (found := figures(kvasir.url)).get("dynamo_frontend_requests_total") == 3 and found)
    page = browser.open(f"{kvasir.url}/dashboard#models")
    row = page.until("[...document.querySelectorAll('main .rows tbody tr')].map((row) => [...row.children].map((cell) => cell.innerText))[0]")
    number = lambda text: float(text.replace(",", ""))  # noqa: E731
    assert row[0] == MARKUP, "markup in a name is text"
    # Of this model alone; the request for a model that nobody serves is counted elsewhere.
    assert number(row[5]) == told["dynamo_frontend_requests_started_total"] - 1
    assert number(row[6]) == told["dynamo_frontend_requests_total"] == 3
    assert number(row[8]) == told["dynamo_frontend_output_tokens_total"]
    page.run("location.hash = 'overview'")
    page.until("document.querySelectorAll('.tile').length > 0")
    tiles = page.run("Object.fromEntries([...document.querySelectorAll('.tile')].map((tile) => [...tile.children].map((part) => part.innerText)).map(([name, ...rest]) => [name, rest]))")
    assert tiles["Requests"][1] == f"{told['dynamo_frontend_requests_started_total']:.0f} since the start"
    assert tiles["Not served"][1].startswith(f"{told['dynamo_frontend_requests_total failed']:.0f} failed")
    assert tiles["Workers"] == ["1", "all serving"]
    page.click(".decisions tbody .linklike")
    page.until("document.querySelector('.explain .facts') !== null")
    assert MARKUP in page.text(".explain"), "the client's own name of the request"
    walk(page, "markup", ["overview", "fleet", "decisions"])
    assert page.run("document.querySelectorAll('img[src=x], main b').length") == 0
    assert page.run("document.title") != "owned"
    page.picture(PICTURES / "markup-desktop.png")
    # The server ends: what was known stays, and the page says that it is old.
    assert kvasir.stop() == 0
    page.until("document.querySelector('#link').innerText.includes('reconnecting')")
    page.until("document.querySelector('#notice').innerText.includes('from before')")
    # A frame that was due before does not take it away.
    page.run("window.dispatchEvent(new Event('resize'))")
    page.run("new Promise((drawn) => requestAnimationFrame(() => requestAnimationFrame(drawn)))")
    assert "from before" in page.text("#notice")
    page.picture(PICTURES / "error-desktop.png")
    page.close()


def test_prefill_and_decode_workers_are_told_apart(browser):
    kvasir = demo("--disagg", "--traffic")
    page = browser.open(f"{kvasir.url}/dashboard#fleet")
    page.until("document.querySelectorAll('.fleet tbody tr').length === 4")
    told = "[...document.querySelectorAll('.fleet tbody tr')].map((row) => [...row.children].map((cell) => cell.innerText))"
    # Prompts are found in the caches of those that compute them.
    rows = page.until(f"((rows) => rows.filter((row) => row[7].includes('%')).length === 2 && rows)({told})")
    for row in rows:
        name, role = row[0].split("\n")
        assert name.startswith("127.0.0.1:") and row[5] == "exact", row
        assert role == ("kvasir-demo, prefill worker" if "%" in row[7] else "kvasir-demo, decode worker"), row
    page.run("location.hash = 'overview'")
    # Each prompt is predicted for two workers, and counted for the one that computes it.
    shares = "document.querySelectorAll('.tile')[3].innerText.match(/([0-9.]+)%/g).map(parseFloat)"
    page.until(f"(([found, predicted]) => found > 0 && Math.abs(found - predicted) < 20)({shares})", 60)
    page.until("[...document.querySelectorAll('.shares:not(.reasons) tbody th')].filter((row) => row.innerText.includes('(prefill)')).length === 2")
    page.run("location.hash = 'models'")
    page.until("document.querySelector('.served').innerText.includes('2 + 2 prefill')")
    page.run("location.hash = 'what-if'")
    page.until("document.querySelector('.why').innerText.startsWith('All')")
    page.run("location.hash = 'decisions'")
    page.until("document.querySelectorAll('.decisions tbody tr').length >= 20")
    page.click(".decisions tbody tr:nth-child(20) .linklike")
    page.until("document.querySelector('.explain .facts') !== null")
    assert page.run("[...document.querySelectorAll('.explain h3')].map((part) => part.innerText)") == ["The prompt is computed", "The answer is written", "What came of it"]
    assert page.run("document.querySelectorAll('.explain .candidates').length") == 2
    walk(page, "prefill", ["overview", "fleet", "decisions"])
    page.close()
    assert kvasir.stop() == 0


def test_operators_act_with_the_token_and_a_second_yes(browser):
    fleet = Fleet("mock", env={"KVASIR_ADMIN_TOKEN": "let-me-in"}, token="let-me-in")
    workers = lambda: httpx.get(f"{fleet.url}/workers", headers={"authorization": "Bearer let-me-in"}).json()  # noqa: E731
    page = browser.open(f"{fleet.url}/dashboard#fleet", "phone")

    def fill(selector, text):
        page.until(f"document.querySelector('{selector}') !== null")
        page.run(f"document.querySelector('{selector}').value = '{text}'")

    page.until("document.querySelector('#link').innerText.includes('locked')")
    page.picture(PICTURES / "locked-phone.png")
    fill("#token", "wrong")
    page.click("dialog button.main")
    page.until("document.querySelector('dialog').innerText.includes('not valid')")
    fill("#token", "let-me-in")
    page.run("document.querySelector('#token').focus()")
    page.press("Enter")
    page.until("document.querySelectorAll('.fleet tbody tr').length === 2")
    page.click(".fleet tbody tr .act button")
    page.until("document.querySelector('dialog').open && document.querySelector('dialog').innerText.includes('ends what it has')")
    page.picture(PICTURES / "confirm-phone.png")
    assert len(workers()["workers"]) == 2, "nothing happens before it is confirmed"
    page.click("dialog button.danger")
    page.until("document.querySelectorAll('.fleet tbody tr').length === 1")
    gone = set(fleet.engines) - {row["url"].rstrip("/") for row in workers()["workers"]}
    assert len(gone) == 1
    page.press("Escape")
    page.click(".toolbar button")
    fill("#worker-url", gone.pop())
    page.click("dialog button.main")
    page.until("document.querySelectorAll('.fleet tbody tr').length === 2")
    page.click("dialog button.main")
    page.run("location.hash = 'models'")
    page.click(".act button")
    fill("#active_prefill_tokens_threshold", "4321")
    page.click("dialog button.main")
    page.until("document.querySelector('main .rows').innerText.includes('4,321 prompt tokens')")
    thresholds = httpx.get(f"{fleet.url}/busy_threshold", headers={"authorization": "Bearer let-me-in"}).json()
    assert thresholds["thresholds"][0]["active_prefill_tokens_threshold"] == 4321
    page.close()
    fleet.stop()


def test_no_workers_and_two_hundred(browser):
    empty = Kvasir("frontend", "--http-host", "127.0.0.1", "--http-port", "0")
    url = "http://" + empty.wait_for(r"address\W+(127\.0\.0\.1:\d+)").group(1)
    page = browser.open(f"{url}/dashboard", "phone")
    page.until("document.querySelector('main').innerText.includes('No worker serves yet')")
    walk(page, "empty")
    page.close()
    assert empty.stop() == 0
    many = demo("--workers", "200", "--traffic")
    page = browser.open(f"{many.url}/dashboard#fleet")
    page.until("document.querySelectorAll('.fleet tbody tr').length === 200")
    page.until("[...document.querySelectorAll('.fleet tbody tr td:nth-of-type(2)')].some((cell) => cell.innerText !== '0')")
    walk(page, "many", ["overview", "fleet", "decisions"])
    # Keys alone reach the first link of a view and open it.
    page.run("document.querySelector('.skip').focus()")
    page.press("Enter")
    page.run("document.querySelector('.decisions tbody .linklike').focus()")
    page.press("Enter")
    page.until("document.querySelector('.explain .why') !== null")
    page.close()
    assert many.stop() == 0
