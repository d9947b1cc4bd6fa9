#!/usr/bin/env python3
"""Makes the pages of the repository a site: what `mdbook build` runs between reading the pages and writing HTML.

Pages link to each other by their paths in the repository, some of them outside `docs`. Here each gets its place in the site (what
docs/SUMMARY.md lists, all decisions below their index), and each link leads to the place of its page. A link to a file that is no
page becomes the file's name. Nothing is written to the sources.
"""

import json
import os
import re
import sys
from pathlib import Path, PurePosixPath

LINK = re.compile(r"(!?)\[((?:[^\[\]]|\[[^\]]*\])*)\]\(([^()\s]+)\)")
DECISIONS = "decisions/README.md"


def chapters(items):
    for item in items:
        if isinstance(item, dict) and "Chapter" in item:
            yield item["Chapter"]
            yield from chapters(item["Chapter"]["sub_items"])


def add_decisions(items, docs):
    """All decisions, below the page that lists them: nobody has to add a line for a new one."""
    for parent in [chapter for chapter in chapters(items) if chapter.get("source_path") == DECISIONS]:
        for page in sorted((docs / "decisions").glob("[0-9]*.md")):
            text = page.read_text(encoding="utf-8")
            path = f"decisions/{page.name}"
            chapter = {"name": text.splitlines()[0].lstrip("# "), "content": text, "number": None, "sub_items": [], "path": path,
                       "source_path": path, "parent_names": [*parent["parent_names"], parent["name"]]}  # fmt: skip
            parent["sub_items"].append({"Chapter": chapter})


def normal(path):
    return os.path.normpath(path).replace(os.sep, "/")


class Site:
    """Which page of the repository is where in the site."""

    def __init__(self, root, docs, book):
        self.root, self.docs = root, docs.relative_to(root).as_posix()
        self.places = {}
        for chapter in chapters(book):
            if source := chapter.get("source_path"):
                path = normal(f"{self.docs}/{source}")
                place = path.removeprefix(f"{self.docs}/")
                place = str(PurePosixPath(place).with_name("index.md")) if place.endswith("README.md") else place
                self.places[path] = chapter["path"] = place

    def link(self, source, place, target):
        """Where a link of a page leads to in the site, or nothing where the site has no such place."""
        path, mark, heading = target.partition("#")
        if not path:
            return target
        path = normal(f"{PurePosixPath(self.docs, source).parent}/{path}")
        if (self.root / path).is_dir():
            path = normal(f"{path}/README.md")
        found = self.places.get(path)
        is_asset = path.startswith(f"{self.docs}/") and not path.endswith(".md") and (self.root / path).is_file()
        if found is None and is_asset:
            found = path.removeprefix(f"{self.docs}/")
        return found and os.path.relpath(found, PurePosixPath(place).parent).replace(os.sep, "/") + mark + heading

    def page(self, chapter):
        source, place = chapter.get("source_path"), chapter.get("path")
        if not source:
            return

        def led(found):
            image, text, target = found.groups()
            if "://" in target or target.startswith("mailto:"):
                return found.group()
            text = LINK.sub(led, text)
            if link := self.link(source, place, target):
                return f"{image}[{text}]({link})"
            path = normal(f"{PurePosixPath(self.docs, source).parent}/{target.partition('#')[0]}")
            return text if text.strip("`") in (path, path.rsplit("/", 1)[-1]) else f"{text} (`{path}`)"

        in_code, lines = False, []
        for line in chapter["content"].split("\n"):
            if line.lstrip().startswith("```"):
                in_code = not in_code
            lines.append(line if in_code else LINK.sub(led, line))
        chapter["content"] = "\n".join(lines)


def main():
    if sys.argv[1:2] == ["supports"]:
        sys.exit(0)
    context, book = json.load(sys.stdin)
    root = Path(context["root"]).resolve()
    docs = root / context["config"]["book"]["src"]
    items = book["items"] if "items" in book else book["sections"]
    add_decisions(items, docs)
    site = Site(root, docs, items)
    for chapter in chapters(items):
        site.page(chapter)
    json.dump(book, sys.stdout)


if __name__ == "__main__":
    main()
