"""Headless Chromium, driven over a pipe: pages at a width and in a colour scheme, as a reader's.

    with Browser(folder) as browser:
        browser.open(path, width=390, dark=True)
        browser.value("document.title")
        browser.screenshot(folder / "page.png")

The folder is for the browser's own files.  Debian's package is `chromium`.
"""

import base64
import fcntl
import json
import os
import shutil
import subprocess

from torchweft.demo.pictures import DOTS
from torchweft.demo.pictures import SMALLEST as LETTERS

__all__ = ["MISSING", "WIDTHS", "Browser", "assert_readable", "installed"]

WIDTHS = (390, 900, 1440)  # of a phone, a tablet, a desk
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
        # free numbers that are neither 3 nor 4
        moved = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (theirs_in, theirs_out)]
        pipes = "3<&{} 4>&{}".format(*moved)
        command = f"exec {installed()} {FLAGS} --user-data-dir={self.folder}/profile {pipes}"
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
        self.width = width
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


SMALLEST = 12.0  # pixels of letters, also in pictures
CONTRAST = 4.5  # of text, as WCAG AA has it

_LOOKED_AT = """(() => {
  const part = e => (e.id || e.className || e.tagName) + ': ' + e.textContent.slice(0, 40);
  const shown = [...document.querySelectorAll('main *')].filter(e => e.getClientRects().length);
  const texts = shown.filter(e => [...e.childNodes].some(n => n.nodeType === 3 && n.data.trim()));
  const numbers = colour => colour.match(/[\\d.]+/g).map(Number);
  const light = colour => {
    const [r, g, b] = numbers(colour).map(v => v / 255).map(
      v => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const ground = e => {
    for (; e; e = e.parentElement) {
      const colour = getComputedStyle(e).backgroundColor;
      if ((numbers(colour)[3] ?? 1) > 0) return colour;
    }
  };
  const contrast = e => {
    const [a, b] = [light(getComputedStyle(e).color), light(ground(e))].sort((x, y) => y - x);
    return (a + 0.05) / (b + 0.05);
  };
  return {
    width: document.documentElement.scrollWidth,
    wide: shown.filter(e => !e.closest('SCROLLS') && e.getBoundingClientRect().right > WIDTH + 1)
      .map(part),
    sizes: texts.map(e => [parseFloat(getComputedStyle(e).fontSize), part(e)]),
    contrasts: texts.map(e => [contrast(e), part(e)]),
    pictures: [...document.images].map(i => i.clientWidth / i.naturalWidth),
  };
})()"""


def assert_readable(browser, scrolls="pre"):
    """Nothing of the open page is cut off, and all letters are large and dark enough.

    What `scrolls`, in CSS, may be wider than its box.  Letters of pictures have 10 points or more.
    """
    browser.value("document.querySelectorAll('details').forEach(d => d.open = true)")
    look = _LOOKED_AT.replace("WIDTH", str(browser.width)).replace("SCROLLS", scrolls)
    found = browser.value(look)
    assert found["width"] == browser.width
    assert not found["wide"]
    assert min(found["sizes"])[0] >= SMALLEST, min(found["sizes"])
    assert min(found["contrasts"])[0] >= CONTRAST, min(found["contrasts"])
    letters = [LETTERS * DOTS / 72 * scale for scale in found["pictures"]]
    assert letters
    assert min(letters) >= SMALLEST, letters
