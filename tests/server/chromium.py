"""Drives a headless Chromium through the DevTools protocol."""

import base64
import contextlib
import itertools
import json
import shutil
import subprocess
import time
from pathlib import Path

from websockets.sync.client import connect

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
EXECUTABLE = next(filter(None, map(shutil.which, NAMES)), None)
KEYS = {"Enter": 13, "Escape": 27, "Tab": 9}


class Tab:
    """A page of its own storage."""

    def __init__(self, browser, session, context):
        self.events = []
        self._browser = browser
        self._session = session
        self.context = context

    def send(self, method, **params):
        return self._browser.send(method, params, self)

    @property
    def session(self):
        return self._session

    def goto(self, url):
        """Loads a page, or loads it again."""
        self.leave()
        self.send("Page.navigate", url=url)
        self.wait_for("location.href !== 'about:blank' && document.readyState === 'complete'")

    def leave(self):
        """Goes to an empty page."""
        self.send("Page.navigate", url="about:blank")
        self.wait_for("location.href === 'about:blank'")

    def evaluate(self, expression):
        """The value of a JavaScript expression; awaits a promise."""
        answer = self.send("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        assert "exceptionDetails" not in answer, answer["exceptionDetails"]
        return answer["result"].get("value")

    def wait_for(self, expression, seconds=20.0):
        """Waits until an expression is true."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            # A page that is being replaced has nothing to evaluate in.
            with contextlib.suppress(RuntimeError):
                if self.evaluate(f"Boolean({expression})"):
                    return
            time.sleep(0.02)
        raise AssertionError(f"not true after {seconds} s: {expression}\n{self.evaluate('document.body.innerText')}")

    def text(self, selector):
        """The text that is shown of the last element that matches; empty if none does."""
        return self.evaluate(f"[...document.querySelectorAll({json.dumps(selector)})].at(-1)?.innerText ?? ''")

    def click(self, selector):
        """Clicks with the mouse in the middle of the first element that matches, which must be in sight."""
        x, y = self.evaluate(
            f"""(() => {{
              const element = document.querySelector({json.dumps(selector)});
              element.scrollIntoView({{block: "nearest"}});
              const box = element.getBoundingClientRect();
              const [x, y] = [box.x + box.width / 2, box.y + box.height / 2];
              const hit = document.elementFromPoint(x, y);
              if (!element.contains(hit)) throw new Error(`covered by ${{hit?.outerHTML}}`);
              return [x, y];
            }})()"""
        )
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=x, y=y, button="left", clickCount=1)

    def type(self, selector, text):
        """Puts text in place of what a field holds."""
        self.evaluate(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        self.send("Input.insertText", text=text)

    def press(self, key):
        """Presses a key where the focus is."""
        code = {"key": key, "windowsVirtualKeyCode": KEYS[key]}
        text = {"text": "\r"} if key == "Enter" else {}
        self.send("Input.dispatchKeyEvent", type="keyDown", **code, **text)
        self.send("Input.dispatchKeyEvent", type="keyUp", **code)

    def resize(self, width, height, *, dark=False):
        """Sets the window's size in CSS pixels, and the system's theme."""
        self.send(
            "Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=width < 600
        )
        features = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.send("Emulation.setEmulatedMedia", features=features)

    def screenshot(self, path):
        """Writes what is in sight as PNG."""
        Path(path).write_bytes(base64.b64decode(self.send("Page.captureScreenshot")["data"]))

    def close(self):
        """Closes the tab, and forgets its storage."""
        self._browser.send("Target.disposeBrowserContext", {"browserContextId": self.context})

    def problems(self):
        """Exceptions, and what the browser reports as an error, so far: refusals of the content security policy too."""
        self.evaluate("0")  # fetches what is under way
        found = []
        for event in self.events:
            params = event["params"]
            if event["method"] == "Runtime.exceptionThrown":
                found.append(params["exceptionDetails"])
            elif event["method"] == "Log.entryAdded" and params["entry"]["level"] == "error":
                found.append(f"{params['entry']['text']}: {params['entry'].get('url')}")
        return found

    def requested(self):
        """The addresses that the page asked for, and the bodies it sent."""
        self.evaluate("0")
        sent = [event["params"] for event in self.events if event["method"] == "Network.requestWillBeSent"]
        requests = [params["request"] for params in sent]
        return [(request["url"], json.loads(request.get("postData", "null"))) for request in requests]


class Chromium:
    """A browser; its tabs share nothing."""

    def __init__(self, folder):
        # The sandbox needs rights that containers do not give; the pages are our own.
        flags = ["--headless=new", "--remote-debugging-port=0", f"--user-data-dir={folder}", "--no-sandbox"]
        flags += ["--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-background-networking"]
        flags += ["--disable-component-update", "--hide-scrollbars"]
        self._process = subprocess.Popen([EXECUTABLE, *flags], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        port_file = Path(folder) / "DevToolsActivePort"
        deadline = time.monotonic() + 30
        while not (port_file.exists() and port_file.read_text().count("\n") == 1):
            assert self._process.poll() is None, "Chromium did not start"
            assert time.monotonic() < deadline, "Chromium opened no port"
            time.sleep(0.02)
        port, path = port_file.read_text().split("\n")
        self._exit = contextlib.ExitStack()
        self._socket = self._exit.enter_context(connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None))
        self._ids = itertools.count(1)
        self._tabs = {}

    def send(self, method, params, tab=None):
        """Sends a command, and returns its result; events that come before it go to their tabs."""
        request_id = next(self._ids)
        session = {"sessionId": tab.session} if tab else {}
        self._socket.send(json.dumps({"id": request_id, "method": method, "params": params, **session}))
        while True:
            message = json.loads(self._socket.recv(timeout=30))
            if message.get("id") == request_id:
                if "error" in message:
                    raise RuntimeError(f"{method}: {message['error']['message']}")
                return message["result"]
            if message.get("sessionId") in self._tabs:
                self._tabs[message["sessionId"]].events.append(message)

    def new_tab(self, context=None):
        """A tab, of the same storage as others of a context."""
        context = context or self.send("Target.createBrowserContext", {})["browserContextId"]
        target = self.send("Target.createTarget", {"url": "about:blank", "browserContextId": context})["targetId"]
        session = self.send("Target.attachToTarget", {"targetId": target, "flatten": True})["sessionId"]
        tab = self._tabs[session] = Tab(self, session, context)
        for domain in ("Page", "Runtime", "Network", "Log"):
            tab.send(f"{domain}.enable")
        tab.resize(1280, 800)
        return tab

    def close(self):
        """Ends the browser and its processes."""
        self.send("Browser.close", {})
        self._exit.close()
        self._process.wait(20)
