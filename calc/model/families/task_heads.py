"""A known trunk with another head, or with none: classifiers, taggers, answer spans, rerankers, reward and embedding models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Final

from calc.errors import InputError
from calc.model.families.common import hidden
from calc.model.fields import Fields
from calc.model.spec import ModelSpec
from calc.model.weights import Part, Weight, dim, linear

# BERT's kin, by their names in lower case: a pooler, and a classifier on it
_ON_POOLER: Final = frozenset(
    "albert bert deberta debertav2 ernie layoutlm megatronbert rembert rocbert new gte jinabert nomicbert".split()
)
# a dense layer before the classifier instead
_ON_DENSE: Final = frozenset(
    "bigbird camembert data2vectext distilbert electra eurobert ibert jinaembeddingsv3 longformer mpnet roformer roberta "
    "robertaprelayernorm xlmroberta xlmrobertaxl xmod".split()
)
_POOLED: Final = (_ON_POOLER | _ON_DENSE) - frozenset(
    "deberta debertav2 distilbert electra eurobert roformer new gte nomicbert".split()
)  # ...Model and ...ForMultipleChoice
# an encoder and a decoder, or heads of their own: what their other classes build is not their decoder's trunk
_SEVERAL: Final = frozenset(
    "bart mbart mvp plbart bigbirdpegasus blenderbot blenderbotsmall marian pegasus whisper trocr".split()
)
_KEEP_POOLER: Final = frozenset(("bigbird", "layoutlm"))  # taggers that hold it without using it
_ONE_TABLE: Final = frozenset("t5 mt5 umt5 longt5".split())
_REFUSED: Final[Mapping[str, frozenset[str]]] = {
    "ForSequenceClassification": _SEVERAL | {"xlnet", "xlm"},
    "ForTokenClassification": _SEVERAL | {"xlm"},
    "ForQuestionAnswering": _SEVERAL | {"xlnet", "xlm", "bigbird"},
    "ForMultipleChoice": _SEVERAL | {"xlnet", "xlm", "electra", "deberta", "debertav2", "distilbert"},
    "ForMaskedLM": _SEVERAL,
    "Model": _SEVERAL,
}
_HEAD_PARTS: Final = ("head_transform", "head_bias", "prediction_head")

Change = Callable[[ModelSpec, Fields, str], ModelSpec]


def refused(suffix: str, base: str) -> bool:
    """Whether the class of a trunk (in lower case) with that ending is not the trunk of its sibling."""
    return base in _REFUSED.get(suffix, ())


def trunk(spec: ModelSpec, *more: Part, keep: tuple[str, ...] = ()) -> ModelSpec:
    """The model up to its last hidden state, and what stands on it."""
    parts = tuple(part for part in spec.other if part.name in keep or part.name not in (*_HEAD_PARTS, "pooler"))
    return replace(spec, head=(), tied=False, has_head=False, other=(*parts, *more))


def labels(fields: Fields) -> int:
    """How many classes a classifier tells apart: of `id2label`, `num_labels`, or two."""
    named = fields.data.get("id2label")
    fields.ignore("num_labels", "classifier_dropout", "summary_type", "pooling", "sentence_embedding_dimension")
    if isinstance(named, dict) and named:
        return len(named)
    return fields.size("num_labels", default=2) if fields.has("num_labels") else 2


def _linear(name: str, fields: Fields, outputs: int, *, bias: bool) -> tuple[Weight, ...]:
    return linear("output", name, dim("C", outputs), dim("h", hidden(fields)), bias=bias)


def _dense(fields: Fields, module: str = "dense") -> tuple[Weight, ...]:
    h = dim("h", hidden(fields))
    return linear("dense", module, h, h, bias=True)


def _pooler(fields: Fields) -> Part:
    return Part("pooler", _dense(fields))


def sequence(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...ForSequenceClassification: one layer over the classes; BERT's kin have a pooler or a dense layer before it."""
    count = labels(fields)
    if base in _ON_POOLER:
        return trunk(spec, _pooler(fields), Part("classifier", _linear("classifier", fields, count, bias=True)))
    if base in _ON_DENSE:
        weights = (*_dense(fields), *_linear("out_proj", fields, count, bias=True))
        return trunk(spec, Part("classifier", weights), keep=("pooler",))
    score = Part("score", _linear("score", fields, count, bias=base == "modernbert"))
    return trunk(spec, score, keep=("prediction_head",))


def token(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...ForTokenClassification: one layer over the classes of each token."""
    kept = ("prediction_head", *(("pooler",) if base in _KEEP_POOLER else ()))
    return trunk(spec, Part("classifier", _linear("classifier", fields, labels(fields), bias=True)), keep=kept)


def span(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...ForQuestionAnswering: the beginning and the end of an answer."""
    fields.ignore("num_labels")
    kept = ("prediction_head", *(("pooler",) if base in _KEEP_POOLER else ()))
    return trunk(spec, Part("answer_span", _linear("qa_outputs", fields, 2, bias=True)), keep=kept)


def choice(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...ForMultipleChoice: one score for each choice."""
    more = (_pooler(fields),) if base in _POOLED else ()
    return trunk(
        spec, *more, Part("classifier", _linear("classifier", fields, 1, bias=True)), keep=("prediction_head",)
    )


def model(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...Model: the trunk alone; most of BERT's kin end in a pooler."""
    if spec.tied and base in _ONE_TABLE:  # it serves encoder, decoder and head
        return spec
    return trunk(spec, *((_pooler(fields),) if base in _POOLED else ()))


def masked(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...ForMaskedLM: the head of the causal class."""
    return spec


def reward(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...ForRewardModel (vLLM; Qwen2.5-Math-RM, InternLM2-Reward): two layers and one score, or one layer alone for InternLM2."""
    fields.ignore("num_labels", "reward_token_id")
    if base == "internlm2":
        return trunk(spec, Part("score", _linear("v_head", fields, 1, bias=False)))
    return trunk(spec, Part("score", (*_dense(fields, "score.0"), *_linear("score.2", fields, 1, bias=True))))


def process_reward(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...ForProcessRewardModel (Qwen2.5-Math-PRM): two layers and the scores of two classes."""
    return trunk(spec, Part("score", (*_dense(fields, "score.0"), *_linear("score.2", fields, 2, bias=True))))


def text_model(spec: ModelSpec, fields: Fields, base: str) -> ModelSpec:
    """...TextModel: the trunk, of a model that has no other part."""
    if spec.towers:
        raise InputError.of(
            "architectures", f"{base}textmodel", "the class of the whole model is counted, not its text alone"
        )
    return model(spec, fields, base)


# the ending of a class's name -> what stands on the trunk
HEADS: Final[Mapping[str, Change]] = {
    "ForSequenceClassification": sequence,
    "ForTokenClassification": token,
    "ForQuestionAnswering": span,
    "ForMultipleChoice": choice,
    "ForMaskedLM": masked,
    "ForProcessRewardModel": process_reward,
    "ForRewardModel": reward,
    "BidirectionalModel": model,
    "TextModel": text_model,
    "EmbeddingModel": model,
    "Model": model,
}
