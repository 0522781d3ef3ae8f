"""Every topic of Learn, drawn without a browser: it has figures or a table, its source, and a sentence where sizes cannot be."""

from typing import get_args

import pytest
from streamlit.testing.v1 import AppTest

from pages.ui.learn import Name

TOPICS = get_args(Name)


def script():
    from pages.ui import learn, link

    link.follow(learn.PLANS, [learn.PLANS])
    learn.show()


def drawn(topic, **fields):
    """The page's elements at a link to this topic with these fields."""
    page = AppTest.from_function(script, default_timeout=60)
    for name, value in {"v": 2, "topic": topic, **fields}.items():
        page.query_params[name] = str(value)
    return page.run()


@pytest.mark.parametrize("topic", TOPICS)
def test_a_topic_shows_figures_its_formula_and_its_source(topic):
    page = drawn(topic)
    assert [each.message for each in page.exception] == []
    assert [each.value for each in page.warning] + [each.value for each in page.error] == []
    assert len(page.metric) + len(page.dataframe) > 0
    text = " ".join(each.value for each in [*page.caption, *page.markdown])
    assert "arXiv" in text or "Source" in text or any("arXiv" in str(each.value) for each in page.dataframe)
    assert topic in ("number-formats",) or len(page.latex) > 0


@pytest.mark.parametrize(
    ("topic", "values", "field"),
    [
        ("all-reduce", {"ring_ranks": 2, "ring_step": 9}, "ring_step"),
        ("checkpointing", {"chain_layers": 3, "checkpoint_every": 4}, "checkpoint_every"),
        ("low-rank", {"adapter_rank": 60000}, "adapter_rank"),
        ("attention-memory", {"on_chip_kib": 1, "attention_head_size": 1024}, "on_chip_kib"),
        ("attention-memory", {"scores": "1, two"}, "scores"),
        ("batching", {"request_tokens": "3, 0"}, "request_tokens"),
        ("parallel-layer", {"tensor_ranks": 7}, "layer_heads"),
        ("layer-roofline", {"query_heads": 33}, "query_heads"),
    ],
)
def test_what_cannot_be_is_a_sentence_that_names_the_field(topic, values, field):
    page = drawn(topic, **values)
    assert [each.message for each in page.exception] == []
    said = [each.value.replace("\\", "") for each in [*page.error, *page.warning, *page.info]]
    assert any(field in text for text in said), said


@pytest.mark.parametrize(
    ("topic", "shown"),
    [
        ("zero-stages", ["111.76 GiB", "29.25 GiB", "15.50 GiB", "1.75 GiB"]),
        ("cache-kinds", ["16.00 GiB", "512.00 KiB", "68.62 KiB"]),
    ],
)
def test_a_table_has_the_papers_numbers(topic, shown):
    page = drawn(topic)
    cells = {str(cell) for table in page.dataframe for cell in table.value.to_numpy().ravel()}
    assert set(shown) <= cells
