"""What README.md and docs/ say that the product prints is what it prints today; `make docs` writes it anew."""

from __future__ import annotations

import re

import pytest

from tests.docs import BLOCKS, PAGES, ROOT, written

TEXTS = {page.relative_to(ROOT).as_posix(): page.read_text(encoding="utf-8") for page in PAGES}
ALL_TEXTS = TEXTS | {name: (ROOT / name).read_text(encoding="utf-8") for name in ("CONTRIBUTING.md", "CHANGELOG.md")}


@pytest.mark.slow
@pytest.mark.parametrize("name", TEXTS)
def test_a_page_is_what_make_docs_writes(name):
    assert TEXTS[name] == written(TEXTS[name]), "run `make docs`"


def test_every_table_that_can_be_written_is_on_a_page():
    assert sorted(re.findall(r"<!-- (?!end)([a-z ]+) -->", "".join(TEXTS.values()))) == sorted(BLOCKS)


@pytest.mark.parametrize("name", ALL_TEXTS)
def test_links_between_pages_lead_somewhere(name):
    for target in re.findall(r"\]\((?!https?:)([^)]+)\)", ALL_TEXTS[name]):
        path, _, heading = target.partition("#")
        found = (ROOT / name).parent / path if path else ROOT / name
        assert found.exists(), target
        if heading:
            headings = re.findall(r"^#+ (.*)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert heading in {re.sub(r"[^\w -]", "", each.lower()).replace(" ", "-") for each in headings}, target


@pytest.mark.parametrize("name", ALL_TEXTS)
def test_files_that_a_page_names_are_there(name):
    for path in re.findall(r"`((?:calc|kernels|measure|pages|tests|docs)/[\w./-]+)`", ALL_TEXTS[name]):
        assert "NAME" in path or (ROOT / path).exists(), path


@pytest.mark.parametrize("name", ALL_TEXTS)
def test_pages_use_the_fields_words(name):
    """Not the words of older versions for the same things."""
    old = r"\b(beside|house|witness(es)?|taken for granted|needed per GPU|peak of the tensors|sequences at once)\b"
    assert re.findall(rf"(?i).*{old}.*", ALL_TEXTS[name]) == []
