"""Headless Chromium, driven over a pipe: pages at a width and in a colour scheme, as a reader's.

    with Browser(folder) as browser:
        browser.open(path, width=390, dark=True)
        browser.value("document.title")
        browser.screenshot(folder / "page.png")

The folder is for the browser's own files.  Debian's package is `chromium`.
"""

import base64
import json
import os
import shutil
import subprocess

MISSING = "Chromium is not installed: apt-get install chromium"
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --hide-scrollbars "
    "--disable-background-networking --disable-component-update --disable-sync "
    "--remote-debugging-pipe"
)


def installed():
    """The program, or None."""
    return shutil.which("chromium")


class Browser:
    """One browser with one page."""

    def __init__(self, folder):
        self.folder = folder

    def __enter__(self):
        (theirs_in, self.out), (self.into, theirs_out) = os.pipe(), os.pipe()
        moved = [os.dup2(end, 50 + n) for n, end in enumerate((theirs_in, theirs_out))]
        command = f"exec {installed()} {FLAGS} --user-data-dir={self.folder}/profile 3<&50 4>&51"
        self.process = subprocess.Popen(
            ["bash", "-c", command], pass_fds=moved, stderr=subprocess.DEVNULL
        )
        for end in (theirs_in, theirs_out, *moved):
            os.close(end)
        self.number, self.rest, self.session = 0, b"", None
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        self.call("Page.enable")
        return self

    def __exit__(self, *error):
        self.process.terminate()
        self.process.wait()
        os.close(self.out)
        os.close(self.into)

    def call(self, method, **arguments):
        """One command of the DevTools protocol, and its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": arguments}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.out, data) :]
        found = self.until(lambda m: m.get("id") == self.number)
        if "error" in found:
            raise RuntimeError(f"{method}: {found['error']['message']}")
        return found["result"]

    def until(self, right):
        """The next message that is right; others are dropped."""
        while True:
            message, end, rest = self.rest.partition(b"\0")
            if not end:
                more = os.read(self.into, 1 << 20)
                if not more:
                    raise RuntimeError("Chromium ended")
                self.rest += more
                continue
            self.rest = rest
            found = json.loads(message)
            if right(found):
                return found

    def open(self, path, width, dark):
        """Load a file in a window of so many pixels."""
        size = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=path.as_uri())
        self.until(lambda m: m.get("method") == "Page.loadEventFired")

    def value(self, expression):
        """What a JavaScript expression gives, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(found["exceptionDetails"]["text"])
        return found["result"].get("value")

    def screenshot(self, path):
        """The whole page as a picture."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        path.write_bytes(base64.b64decode(found["data"]))
