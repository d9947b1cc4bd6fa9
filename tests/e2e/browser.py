"""A real Chromium, driven over its debugging pipe: opens pages, clicks, reads what is drawn, takes pictures.

Chromium speaks JSON messages that end with a zero byte over the file descriptors 3 and 4; nothing needs to be installed
beside the browser.
"""

import base64
import json
import os
import select
import shutil
import subprocess
import tempfile
import time

SIZES = {"desktop": (1440, 1000, 1, False), "phone": (390, 844, 2, True)}


class Browser:
    def __init__(self):
        found = shutil.which("chromium") or shutil.which("chromium-browser")
        assert found, "./test installs chromium; without it: apt-get install chromium"
        self._home = tempfile.TemporaryDirectory()
        to_child, self._write = os.pipe()
        self._read, from_child = os.pipe()

        def descriptors():
            # Copies first: either may be 3 or 4 already.
            one, two = os.dup(to_child), os.dup(from_child)
            os.dup2(one, 3)
            os.dup2(two, 4)

        # It asks nobody but the server under test.
        flags = ["--headless", "--no-sandbox", "--disable-gpu", "--hide-scrollbars", "--no-first-run", "--remote-debugging-pipe",
                 "--disable-quic", "--disable-background-networking", "--disable-component-update", "--disable-sync", "--force-color-profile=srgb", f"--user-data-dir={self._home.name}", "about:blank"]  # fmt: skip
        self._process = subprocess.Popen([found, *flags], preexec_fn=descriptors, close_fds=False, stdout=subprocess.DEVNULL,
                                         stderr=subprocess.DEVNULL)  # fmt: skip
        os.close(to_child)
        os.close(from_child)
        self._unread = b""
        self._number = 0
        self.events = []

    def close(self):
        self._process.kill()
        self._process.wait()
        os.close(self._write)
        os.close(self._read)
        try:
            self._home.cleanup()
        except OSError:
            pass  # A child of the browser may still write.

    def call(self, method, session=None, seconds=60, **params):
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if session:
            message["sessionId"] = session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        wanted, end = self._number, time.monotonic() + seconds
        while True:
            told = self._message(end, method)
            if told.get("id") == wanted:
                assert "error" not in told, (method, told["error"])
                return told["result"]
            self.events.append(told)
            del self.events[:-500]

    def _message(self, end, what):
        while b"\0" not in self._unread:
            left = end - time.monotonic()
            assert left > 0 and select.select([self._read], [], [], left)[0], f"the browser did not answer {what}"
            part = os.read(self._read, 1 << 20)
            assert part, f"the browser ended at {what}"
            self._unread += part
        told, self._unread = self._unread.split(b"\0", 1)
        return json.loads(told)

    def open(self, url, size="desktop", dark=False):
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        return Page(self, session, target, url, size, dark)


class Page:
    def __init__(self, browser, session, target, url, size, dark):
        self._browser, self._session, self._target = browser, session, target
        width, height, scale, mobile = SIZES[size]
        self.size = size
        for domain in ("Page", "Runtime", "Log"):
            self._call(f"{domain}.enable")
        self._call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=scale, mobile=mobile)
        self.theme(dark)
        self._call("Page.navigate", url=url)

    def _call(self, method, **params):
        return self._browser.call(method, self._session, **params)

    def theme(self, dark):
        self._call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}])

    def run(self, script):
        """The value of an expression in the page."""
        told = self._call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in told, (script, told["exceptionDetails"])
        return told["result"].get("value")

    def until(self, script, seconds=30):
        """Waits until an expression is true in the page; its value."""
        end = time.monotonic() + seconds
        while not (found := self.run(f"(() => {{ try {{ return {script} }} catch (error) {{ return null }} }})()")):
            assert time.monotonic() < end, f"not within {seconds} s: {script}\n{self.text()}\n{self.complaints()}"
            time.sleep(0.05)
        return found

    def text(self, selector="body"):
        return self.run(f"document.querySelector({json.dumps(selector)})?.innerText ?? ''")

    def click(self, selector):
        self.until(f"document.querySelector({json.dumps(selector)}) !== null")
        self.run(f"document.querySelector({json.dumps(selector)}).click()")

    def press(self, key):
        """One of the keys that a page without a mouse is used with, at what has the focus."""
        code = {"Tab": 9, "Enter": 13, "Escape": 27, "ArrowLeft": 37}[key]
        typed = {"text": "\r"} if key == "Enter" else {}
        self._call("Page.bringToFront")
        self._call("Input.dispatchKeyEvent", type="keyDown", key=key, code=key, windowsVirtualKeyCode=code, **typed)
        self._call("Input.dispatchKeyEvent", type="keyUp", key=key, code=key, windowsVirtualKeyCode=code)

    def complaints(self):
        """What the browser complained of: errors of scripts, refused by the content-security policy."""
        own = [event for event in self._browser.events if event.get("sessionId") == self._session]
        found = [event["params"]["exceptionDetails"] for event in own if event.get("method") == "Runtime.exceptionThrown"]
        logged = [event["params"]["entry"] for event in own if event.get("method") == "Log.entryAdded"]
        return found + [entry for entry in logged if entry["level"] == "error" and "favicon" not in entry.get("url", "")]

    def nameless(self):
        """What can be reached by keys and has no name that a screen reader would say."""
        nodes = self._call("Accessibility.getFullAXTree")["nodes"]
        named = {"button", "link", "textbox", "searchbox", "combobox", "slider", "checkbox", "dialog", "table", "region", "image"}
        said = lambda node, part: node.get(part, {}).get("value", "")  # noqa: E731
        return [said(node, "role") for node in nodes if not node.get("ignored") and said(node, "role") in named and not said(node, "name")]

    def pale(self):
        """Texts whose colour differs from what is behind them by less than 4.5 to 1, the bound of WCAG AA."""
        return self.run("""(() => {
            const light = (colour) => {
                const [r, g, b] = colour.match(/[\\d.]+/g).map(Number).map((part) => part / 255).map((part) => part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
            };
            const behind = (element) => {
                for (let at = element; at; at = at.parentElement) {
                    const colour = getComputedStyle(at).backgroundColor;
                    if (!colour.endsWith(", 0)") && colour !== "transparent") return colour;
                }
                return "rgb(255, 255, 255)";
            };
            const found = [];
            for (const element of document.querySelectorAll("body *")) {
                const own = [...element.childNodes].some((node) => node.nodeType === 3 && node.textContent.trim() !== "");
                if (!own || !element.checkVisibility({ visibilityProperty: true }) || element.closest("svg, option, script, noscript, .hidden, .skip, [disabled]")) continue;
                const [text, back] = [light(getComputedStyle(element).color), light(behind(element))];
                const ratio = (Math.max(text, back) + 0.05) / (Math.min(text, back) + 0.05);
                if (ratio < 4.5) found.push(`${element.tagName} ${element.className}: ${element.textContent.slice(0, 40)}: ${ratio.toFixed(2)}`);
            }
            return [...new Set(found)];
        })()""")

    def overflow(self):
        """Pixels by which the page is wider than its window."""
        return self.run("document.documentElement.scrollWidth - document.documentElement.clientWidth")

    def picture(self, path, whole=False):
        # A page behind another draws nothing.
        self._call("Page.bringToFront")
        params = {"format": "png", "captureBeyondViewport": whole}
        if whole:
            box = self._call("Page.getLayoutMetrics")["cssContentSize"]
            params["clip"] = {"x": 0, "y": 0, "width": box["width"], "height": min(box["height"], 6000), "scale": 1}
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(base64.b64decode(self._call("Page.captureScreenshot", **params)["data"]))
        return path

    def close(self):
        self._browser.call("Target.closeTarget", targetId=self._target)
