"""README.zh.md is README.md in Chinese: the same commands, code, links, pictures and numbers in the same order."""
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
PAGES = [(ROOT / name).read_text() for name in ("README.md", "README.zh.md")]


def without_comments(text):
    return [re.sub(r"\s+#.*", "", line).rstrip() for line in text.splitlines()]


def code(page):
    return [without_comments(body) for body in re.findall(r"```\w*\n(.*?)```", page, re.S)]


def links(page):
    return re.findall(r"\]\(([^)]+)\)", page)


def prose(page):
    return re.sub(r"```.*?```", "", page, flags=re.S)


def words_in_code(page):
    return sorted(re.findall(r"`([^`\n]+)`", prose(page)))


def numbers(page):
    """The order of a sentence is that of its language; a row of a table stays a row."""
    found = re.compile(r"\d[\d.]*\d|\d")
    rows = [sorted(found.findall(line)) for line in page.splitlines() if line.startswith("| ")]
    return [*rows, sorted(found.findall(prose(page)))]


@pytest.mark.parametrize("part", [code, links, words_in_code, numbers])
def test_both_pages_have_the_same(part):
    english, chinese = (part(page) for page in PAGES)
    if part is links:  # each page links to the other
        english[english.index("README.zh.md")] = chinese[chinese.index("README.md")] = "the other"
    assert english == chinese and len(english) > 4


def test_the_pages_have_the_same_shape():
    heads = [[line.count("#") for line in page.splitlines() if re.match("#+ ", line)] for page in PAGES]
    assert heads[0] == heads[1] and abs(PAGES[0].count("\n") - PAGES[1].count("\n")) <= 8
