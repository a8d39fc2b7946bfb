"""browser.py -- reads reports: their elements and charts, and how a headless Chromium renders
them."""

import json
import pathlib
import re
import shutil
import subprocess
from dataclasses import dataclass, field
from html.parser import HTMLParser

import pytest

from tests.lib.patience import LIMIT

NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
EMPTY = {"meta", "rect", "path", "br"}
WIDTHS = (1280, 390)  # of a desk and of a hand, in pixels


# ---- elements


@dataclass
class Element:
    tag: str
    attributes: dict[str, str]
    text: str = ""
    inside: list["Element"] = field(default_factory=list)

    def all(self, tag: str) -> list["Element"]:
        """Return the elements of a tag inside, in order."""
        return [
            x for e in self.inside for x in ([e] if e.tag == tag else []) + e.all(tag)
        ]

    def whole(self) -> str:
        """Return the text of the element and of those inside it."""
        return self.text.strip() + "".join(e.whole() for e in self.inside)

    def section(self, name: str) -> "Element":
        return next(e for e in self.all("section") if e.attributes["id"] == name)

    def table(self, title: str) -> dict[str, list[str]]:
        """Return the rows of a table by their heads."""
        (found,) = [t for t in self.all("table") if t.all("caption")[0].text == title]
        return {
            row.all("th")[0].whole(): [c.whole() for c in row.all("td")]
            for row in found.all("tbody")[0].all("tr")
        }

    def charts(self) -> list[dict]:
        """Return the data of the charts inside."""
        return [json.loads(f.all("script")[0].text) for f in self.all("figure")]


class _Reader(HTMLParser):
    def __init__(self) -> None:
        super().__init__()
        self.open = [Element("", {})]

    def handle_starttag(self, tag: str, given: list[tuple[str, str | None]]) -> None:
        made = Element(tag, {key: value or "" for key, value in given})
        self.open[-1].inside.append(made)
        if tag not in EMPTY:
            self.open.append(made)

    def handle_startendtag(self, tag: str, given: list) -> None:
        self.open[-1].inside.append(Element(tag, dict(given)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open[-1].tag == tag, f"</{tag}> ends <{self.open[-1].tag}>"
        self.open.pop()

    def handle_data(self, text: str) -> None:
        self.open[-1].text += text


def parsed(text: str) -> Element:
    """Return the root of a page. Every element must be closed in its place."""
    reader = _Reader()
    reader.feed(text)
    reader.close()
    (root,) = reader.open
    return root


def outside(text: str) -> list[str]:
    """Return everything by which a page would load something from outside itself."""
    root = parsed(text)
    found = []
    for tag in ("link", "img", "iframe", "object", "embed", "base", "source", "video"):
        found += [e.tag for e in root.all(tag)]
    every = [e for tag in ("a", "script", "svg", "rect", "path") for e in root.all(tag)]
    for e in every:
        for key in ("src", "href", "xlink:href"):
            if not e.attributes.get(key, "#").startswith("#"):
                found.append(e.attributes[key])
    for e in (*root.all("style"), *root.all("script")):
        found += re.findall(r"url\(|@import|\bfetch\(|XMLHttp|import\(|https?:", e.text)
    (policy,) = [
        e.attributes["content"]
        for e in root.all("meta")
        if e.attributes.get("http-equiv") == "Content-Security-Policy"
    ]
    return found if policy.startswith("default-src 'none';") else [policy, *found]


# ---- in a browser

WATCH = """<script>
const faults = [];
window.requestAnimationFrame = (draw) => setTimeout(draw); /* a virtual clock draws few frames */
addEventListener("error", (e) => faults.push(e.message));
addEventListener("securitypolicyviolation", (e) => faults.push(e.blockedURI));
console.error = console.warn = (...said) => faults.push(said.join(" "));
</script>"""
PROBE = """<script>
function colours(canvas) {
  const wide = canvas.width, c = canvas.getContext("2d");
  const found = new Set(new Uint32Array(c.getImageData(0, 0, wide, canvas.height).data.buffer));
  return found.size;
}
function empty(e) {
  const box = e.getBoundingClientRect();
  return box.width < 1 || box.height < 1;
}
const tags = "section, table, figure, canvas, output, button, .legend svg";
const result = {
  overflow: document.documentElement.scrollWidth - innerWidth,
  wide: innerWidth,
  paper: getComputedStyle(document.body).backgroundColor,
  empty: [...document.querySelectorAll(tags)].filter(empty).map((e) => e.tagName),
  canvases: [...document.querySelectorAll("canvas")].map(colours),
  told: []
};
function act() {
  for (const figure of document.querySelectorAll("figure")) {
    const canvas = figure.querySelector("canvas"), out = figure.querySelector("output");
    const press = (key) => canvas.dispatchEvent(new KeyboardEvent("keydown", { key }));
    const told = [out.textContent];
    canvas.focus();
    const focused = document.activeElement === canvas;
    for (const key of ["n", "n", "ArrowDown", "p"]) {
      press(key);
      told.push(out.textContent);
    }
    const before = canvas.toDataURL();
    result.told.push({ focused, told, before });
    for (const key of ["+", "+", "ArrowRight"]) press(key);
  }
  setTimeout(end, 200);
}
function end() {
  const figures = [...document.querySelectorAll("figure")];
  figures.forEach((figure, n) => {
    const canvas = figure.querySelector("canvas");
    result.told[n].zoomed = canvas.toDataURL() !== result.told[n].before;
    delete result.told[n].before;
    figure.querySelector('[data-does="whole"]').click();
  });
  result.faults = faults;
  const pre = document.createElement("pre");
  pre.id = "result";
  pre.textContent = JSON.stringify(result);
  document.body.replaceChildren(pre);
}
setTimeout(act, 200);
</script>"""


def browser() -> str:
    """Return the path of a Chromium, or skip the test."""
    for name in NAMES:
        if found := shutil.which(name):
            return found
    pytest.skip(f"no browser on this machine: {', '.join(NAMES)}")


def shown(text: str, folder: pathlib.Path, wide: int, dark: bool) -> dict:
    """Return boxes, colours, answers to keys and errors of a page in a browser."""
    program = browser()
    path = folder / f"probe-{wide}-{dark}.html"
    watched = text.replace("<style>", f"{WATCH}<style>", 1)
    path.write_text(watched.replace("</body>", f"{PROBE}</body>"))
    done = subprocess.run(
        [
            program,
            "--headless",
            "--no-sandbox",
            "--disable-gpu",
            "--hide-scrollbars",
            f"--window-size={wide},1000",
            f"--user-data-dir={folder / 'browser'}",
            f"--blink-settings=preferredColorScheme={int(not dark)}",
            "--virtual-time-budget=5000",
            "--dump-dom",
            path.as_uri(),
        ],
        capture_output=True,
        text=True,
        timeout=LIMIT,
    )
    (found,) = [e for e in parsed(done.stdout).all("pre")]
    return json.loads(found.text)


def check(text: str, folder: pathlib.Path, wide: int, dark: bool) -> None:
    """Check that a page is drawn without errors, fits its window and answers keys."""
    got = shown(text, folder, wide, dark)
    assert got["faults"] == []
    assert got["wide"] == wide and got["overflow"] <= 0
    assert got["paper"] == ("rgb(21, 24, 29)" if dark else "rgb(255, 255, 255)")
    assert got["empty"] == []
    charts = parsed(text).charts()
    assert len(got["canvases"]) == len(charts) > 0
    for drawn, chart, said in zip(got["canvases"], charts, got["told"], strict=True):
        assert drawn > 5 + len(chart["series"]), "blank"
        assert said["focused"] and said["zoomed"]
        start, first, second, other, back = said["told"]
        assert len({start, first, second, other}) == 4, said["told"]
        names = [track["name"] for track in chart["tracks"]]
        assert names[0] in first and names[0] in second
        assert len(names) == 1 or names[1] in other and names[1] in back
