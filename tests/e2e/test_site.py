"""The documents as a site: mdbook builds it, and every link in it leads to a page and a place that there are."""

import shutil
import subprocess
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

ROOT = Path(__file__).parents[2]
# What mdbook's own frame links to and this site does not have.
FRAME = {"print.html"}


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.links, self.places = [], {""}
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        told = dict(attributes)
        self.places.update(value for name, value in attributes if name in ("id", "name") and value)
        for name in ("href", "src"):
            if tag in ("a", "img", "script", "link") and told.get(name):
                self.links.append(told[name])


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    if shutil.which("mdbook") is None:
        pytest.skip("NO mdbook here: the site is NOT built")
    folder = tmp_path_factory.mktemp("site") / "book"
    built = subprocess.run(["mdbook", "build", "--dest-dir", folder, ROOT], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert built.returncode == 0 and "ERROR" not in built.stderr and "WARN" not in built.stderr, built.stderr
    return folder


def test_every_link_of_the_site_leads_somewhere(site):
    pages = {path.relative_to(site).as_posix(): Page(path.read_text()) for path in site.rglob("*.html")}
    assert len(pages) > 100, "all guides, references and decisions"
    dead = []
    for name, page in pages.items():
        for link in page.links:
            parts = urlsplit(link)
            if parts.scheme or parts.netloc or parts.path in FRAME:
                continue
            target = (site / name).parent / unquote(parts.path) if parts.path else site / name
            target = (target / "index.html" if target.is_dir() else target).resolve()
            if not target.is_file() or not target.is_relative_to(site.resolve()):
                dead.append(f"{name}: {link}")
            elif parts.fragment and target.suffix == ".html":
                if unquote(parts.fragment) not in pages[target.relative_to(site.resolve()).as_posix()].places:
                    dead.append(f"{name}: {link}: no such place")
    assert not dead, "\n".join(sorted(set(dead)))


def test_the_first_page_leads_to_each_start(site):
    first = (site / "index.html").read_text()
    for page in (ROOT / "docs/start").glob("*.md"):
        assert f"start/{page.stem}.html" in first, page.name
