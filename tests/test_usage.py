from __future__ import annotations

import re
from pathlib import Path

from batchrun import usage
from batchrun.compose import choices
from batchrun.config import MODES, leaves

DOCS = Path(__file__).resolve().parent.parent / "docs"


def test_configuration_page_is_in_step_with_the_schema():
    page = (DOCS / "configuration.md").read_text(encoding="utf-8")
    assert page == usage.keys_markdown(), "run `python -m batchrun.usage > docs/configuration.md`"


def test_keys_text_has_every_setting_with_type_and_default():
    lines = usage.keys_text().splitlines()
    assert len(lines) == 2 * len(leaves())
    for line in ("input.limit: integer = null", "launch.count: integer = 1", "sampling.temperature: number = 0.0"):
        assert line in lines
    assert "engine.prefix_caching: true or false = true" in lines
    assert "output.prefix: string = ''" in lines


def test_help_says_something_about_each_mode_job_and_option():
    found = choices()
    text = usage.help_text(found)
    for name in [*MODES, *found.jobs, *(option for options in found.groups.values() for option in options)]:
        lines = [line.split() for line in text.splitlines() if line.split()[:1] == [name]]
        assert lines
        assert all(len(words) > 2 for words in lines), f"--help says nothing about {name}"


def test_keys_set_most_often_exist():
    assert set(usage.COMMON_KEYS) <= set(leaves())


def test_links_between_pages_lead_somewhere():
    for page in [DOCS.parent / "README.md", *DOCS.glob("*.md")]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name} links to {target}"
