"""Layers that predict further tokens (multi-token prediction, MTP): most checkpoints hold them, few model classes build them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from calc.model.fields import Fields
from calc.model.spec import Layer, ModelSpec, Stack, Tower
from calc.model.weights import Part, Split, Weight, dim, linear

_NORMS = ("token_norm", "hidden_norm", "final_norm")


def count(fields: Fields, key: str = "num_nextn_predict_layers") -> int:
    """How many such layers the checkpoint holds."""
    return fields.size(key, default=0, low=0, high=64) if fields.has(key) else 0


def with_prediction(
    spec: ModelSpec, layers: int, layer: Layer | None = None, *, copies: bool = False, in_total: bool = False
) -> ModelSpec:
    """The model with so many MTP layers, each like its last layer unless `layer` is given (DeepSeek-V3, arXiv 2412.19437,
    section 2.2): a projection of 2 h to h, norms on its two inputs and its output. `copies`: each stores the embedding and head too.
    """
    if not layers:
        return spec
    h, vocab = dim("h", spec.hidden_size), dim("V", spec.vocab_size)
    like = layer or spec.layers.kinds[spec.layers.pattern[-1]]
    extra = [Part("projection", linear("input", "eh_proj", h, dim("2", 2) * h))]
    if copies:
        table = Weight("token", (vocab, h), Split.VOCAB, "embed_tokens")
        extra.append(Part("copies", (table, *linear("head", "shared_head.head", vocab, h, Split.VOCAB))))
    norms = (*like.norms, *(replace(like.norms[0], name=name) for name in _NORMS))
    made = replace(like, kind="layer", norms=norms, extra=(*like.extra, *extra))
    return replace(spec, towers=(*spec.towers, Tower("prediction", Stack((made,), (0,) * layers), in_total=in_total)))


def with_blocks(spec: ModelSpec, blocks: Sequence[Layer]) -> ModelSpec:
    """The model with one step of prediction made of several layers (Nemotron 3): the first joins the token and the hidden state,
    the last ends in a norm; embedding and head are the model's own. The checkpoint holds them, the class does not build them."""
    h = dim("h", spec.hidden_size)
    token, before, last = (replace(blocks[0].norms[0], name=name) for name in _NORMS)
    joined = (*linear("input", "eh_proj", h, dim("2", 2) * h), *token.weights, *before.weights)
    made = list(blocks)
    made[0] = replace(made[0], extra=(*made[0].extra, Part("projection", joined)))
    made[-1] = replace(made[-1], norms=(*made[-1].norms, last))
    tower = Tower("prediction", Stack(tuple(made), tuple(range(len(made)))), in_total=False)
    return replace(spec, towers=(*spec.towers, tower))
