"""Views of a parameter count: by component, total against active, against the textbook's form and the Hub's figure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import streamlit as st

from calc.breakdown import Component
from calc.parameters import ParameterAnswer
from calc.stored import Comparison, hub_total
from calc.units import show_bytes, show_count
from pages.ui import charts, hub_models, parts
from pages.ui.appearance import HUB
from pages.ui.numbers import Figure, Numbers
from pages.ui.parts import spaced
from pages.ui.scenario import Scenario
from pages.ui.text import plain

_HEIGHT = 424  # pixels of the treemap
_IDLE = "#a3abb6"  # reads on light and dark
_DEPTH = 4  # levels drawn at once; a click opens what lies below


def figures_of(answer: ParameterAnswer, numbers: Numbers, _: Scenario | None = None) -> list[Figure]:
    """The four figures under the treemap."""
    total, active, embedding, trainable = answer.total, answer.active, answer.embedding, answer.trainable
    return [
        Figure("Parameters", numbers.show(total, "parameters"), f"{total:,}", total),
        Figure(
            "Active for a token",
            numbers.show(active, "parameters"),
            f"{active:,}: all but the experts that it is not sent to",
            active,
        ),
        Figure("Embedding", numbers.show(embedding, "parameters"), f"{embedding:,} in the embedding tables", embedding),
        Figure(
            "Trainable",
            numbers.show(trainable, "parameters"),
            f"{trainable:,}: the adapters where LoRA is on, else all",
            trainable,
        ),
    ]


def total_against_active(answer: ParameterAnswer, numbers: Numbers, _: Scenario) -> None:
    """A bar of all parameters, and where there are experts one of those that a token uses, in the same parts."""
    whole = parts.by_role(answer.breakdown)
    rows = {"all": whole}
    if answer.active < answer.total:
        charts.title("All parameters, and those that one token uses")
        rows["for a token"] = parts.by_role(answer.active_breakdown)
    charts.stacked(
        rows, "parameters", numbers, "all and active", "Parameters by component: all, and those of one token"
    )


@dataclass(frozen=True, slots=True)
class _Tile:
    path: str
    parent: str
    name: str
    value: float
    leaf: bool
    idle: bool = False


def treemap(answer: ParameterAnswer, numbers: Numbers, _: Scenario) -> None:
    """The components as areas; experts that a token does not use are grey. Streamlit imports plotly here, on no other page."""
    tiles = [tile for tile in _all_tiles(answer) if tile.value]
    trace = {
        "type": "treemap",
        "ids": [tile.path for tile in tiles],
        "parents": [tile.parent for tile in tiles],
        "labels": [tile.name for tile in tiles],
        "values": [tile.value if tile.leaf else 0 for tile in tiles],
        "text": [show_count(tile.value) for tile in tiles],
        "hovertext": [f"{spaced(tile.path)}<br>{tile.value:,} · {tile.value / answer.total:.2%}" for tile in tiles],
        "hoverinfo": "text",
        "textinfo": "label+text",
        "maxdepth": _DEPTH,
        "tiling": {"pad": 1},
        "marker": {
            "colors": [_IDLE if tile.idle else parts.colour_of(parts.role_of(tile.path)) for tile in tiles],
            "depthfade": False,
            "pad": {"t": 18, "l": 2, "r": 2, "b": 2},
        },
        "pathbar": {"visible": True},
    }
    layout = {"height": _HEIGHT, "margin": {"l": 0, "r": 0, "t": 24, "b": 0}}
    said = f"Treemap of {answer.total:,} parameters by component"
    st.plotly_chart({"data": [trace], "layout": layout}, key="treemap", config={"displayModeBar": False}, alt=said)
    if answer.active < answer.total:
        st.caption("Grey: the experts that a token is not sent to. A click opens a part.")


def _all_tiles(answer: ParameterAnswer) -> Iterator[_Tile]:
    """The parts of the whole, the layers opened: else nearly all of a model had one colour."""
    root, active = answer.breakdown.root, answer.active_breakdown.root
    for part, used in zip(root.children, active.children, strict=True):
        if part.name == "layers":
            for child, used_child in zip(part.children, used.children, strict=True):
                yield from _tiles(child, used_child, f"layers/{child.name}", "", part.count)
        else:
            yield from _tiles(part, used, part.name, "", 1)


def _tiles(part: Component, active: Component, path: str, parent: str, copies: int) -> Iterator[_Tile]:
    """A part and what lies in it; experts are split by use, not by weight."""
    name = spaced(part.name) + (f" × {part.count:,}" if part.count > 1 else "")
    name += f" × {copies:,} layers" if copies > 1 and not parent else ""
    whole, used = part.total * copies, active.total * copies
    split = part.count != active.count
    yield _Tile(path, parent, name, whole, leaf=not (split or part.children))
    if split:
        yield _Tile(f"{path}/for a token", path, f"{active.count:,} for a token", used, leaf=True)
        yield _Tile(f"{path}/idle", path, f"{part.count - active.count:,} idle", whole - used, leaf=True, idle=True)
        return
    for child, active_child in zip(part.children, active.children, strict=True):
        yield from _tiles(child, active_child, f"{path}/{child.name}", path, copies * part.count)


def textbook(answer: ParameterAnswer, numbers: Numbers, _: Scenario) -> None:
    """The count that courses teach, with the reasons why it is another number."""
    taught = answer.textbook
    st.markdown(
        f"By the textbook's V·h + L·(12.04·h² + 12.36·h) **{taught.total:,}**; exactly **{answer.total:,}**, "
        f"a difference of {answer.total - taught.total:+,}. The textbook's form"
    )
    st.markdown("".join(f"- {plain(reason)}\n" for reason in taught.reasons))


def hub_page(answer: ParameterAnswer, numbers: Numbers, asked: Scenario) -> None:
    """What the model's Hub page states, with the reasons why it is another number."""
    _stated(answer)
    if asked.subject.model == HUB and st.toggle(
        "Read what its files store", key="stored", help="Reads the headers of its weights, not the weights."
    ):
        _stored(hub_models.stored(asked.model))


def _stated(answer: ParameterAnswer) -> None:
    st.markdown(
        "A Hub page counts the numbers that the checkpoint stores; the figure here counts what its class builds."
    )
    stated = hub_total(answer)
    if stated:
        same = "the same" if not stated.difference else f"{stated.difference:+,}"
        st.markdown(f"Its Hub page says **{stated.stated:,}**; exactly **{answer.total:,}**. The difference: {same}.")
        st.markdown("".join(f"- {plain(reason)}\n" for reason in stated.reasons))
        st.caption(f"Source: {plain(stated.source)}")
        return
    for name, amount in answer.not_in_total.items():
        st.markdown(
            f"- {amount:+,}: {plain(name)} layers, which the checkpoint holds and the class does not build: "
            f"**{answer.total + amount:,}** in all"
        )
    st.markdown("No figure of its Hub page is known here.")


def _stored(found: Comparison | None) -> None:
    if found is None:
        st.info("Its files could not be read: they hold no safetensors headers, or the Hub did not answer in time.")
        return
    difference = f"; stored minus exact: {found.difference:+,}" if found.difference is not None else ""
    st.markdown(f"Stored: **{found.stored.elements:,}** elements, {show_bytes(found.stored.bytes)}{difference}.")
    st.markdown("".join(f"- {plain(reason)}\n" for reason in found.reasons))
    sums = {**found.stored.by_group(), **found.stored.by_dtype()}
    st.dataframe(
        {
            "Stored": list(sums),
            "Elements": [f"{total.elements:,}" for total in sums.values()],
            "Bytes": [show_bytes(total.bytes) for total in sums.values()],
        },
        hide_index=True,
    )
