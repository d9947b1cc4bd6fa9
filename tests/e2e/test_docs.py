"""Guides that name commands name commands that there are."""

import re
from pathlib import Path

from test_cli import kvasir

GUIDES = Path(__file__).parents[2] / "docs/guide"


def test_every_symptom_ends_in_a_command_that_there_is():
    rows = [line for line in (GUIDES / "troubleshooting.md").read_text().splitlines() if line.startswith("| ") and not line.startswith("| symptom")]
    assert len(rows) > 15
    for row in rows:
        found = re.fullmatch(r".*\| `kvasir ([^`]+)` \|", row)
        assert found, f"no command ends this row: {row}"
        command, *rest = found.group(1).split()
        told = kvasir("help", command)
        assert told.returncode == 0, row
        for flag in (word for word in rest if word.startswith("--")):
            assert flag in told.stdout, row
        if command == "config":
            assert rest[0] in told.stdout, row


def test_options_that_guides_name_are_there():
    """Options of ours, that is: those of engines and of other programs are named here."""
    theirs = {"--kv-events-config", "--enable-prompt-tokens-details", "--release", "--profile"}
    reference = (GUIDES.parent / "reference/options.md").read_text()
    for name in ("troubleshooting.md", "how-routing-decides.md", "dashboard.md"):
        for flag in set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]+", (GUIDES / name).read_text())) - theirs:
            assert f"`{flag}" in reference, (name, flag)
