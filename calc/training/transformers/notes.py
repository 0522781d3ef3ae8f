"""What an answer says of model classes whose transformers program is not followed operator by operator."""

from __future__ import annotations

from collections.abc import Iterator

from calc.model.mixers import Attention, LatentAttention, Recurrence
from calc.model.spec import ModelSpec
from calc.training.model_classes import model_class
from calc.training.plan import TrainingPlan
from calc.training.transformers.stage import needs_eager


def remarks(spec: ModelSpec) -> list[str]:
    """What an answer must say of a model whose program is not followed; nothing where it is."""
    own = model_class(spec.architecture)
    mixers = [kind.mixer for kind in spec.layers.kinds]
    kinds = dict.fromkeys(mixer.kind for mixer in mixers if isinstance(mixer, Recurrence))
    texts = [
        f"{kind} layers are counted as their input and what fused kernels are known to keep (mamba-ssm, "
        "flash-linear-attention): transformers' own PyTorch code, which the trace runs, keeps several times as much"
        for kind in kinds
    ]
    alibi = own.modeling == "falcon" and not all(isinstance(m, Attention) and m.rotary for m in mixers)
    if own.followed and not alibi:
        return texts
    against = (
        f"against the trace they are {own.shortfall}" if own.shortfall else "they have not been held against the trace"
    )
    indexed = any(isinstance(mixer, Attention | LatentAttention) and mixer.indexer for mixer in mixers)
    instead = "without the indexer's own tensors" if indexed else "of a generic block"
    texts.append(
        f"{spec.architecture}: its program in transformers is not followed operator by operator; activations are those "
        f"{instead}, states are exact; {against}"
    )
    return texts


def _attention(plan: TrainingPlan, spec: ModelSpec) -> Iterator[str]:
    """Where `sdpa` is not what its name promises in transformers."""
    if plan.attention != "sdpa":
        return
    if needs_eager(spec):
        reason = (
            "its class has no SDPA"
            if model_class(spec.architecture).eager_only
            else "capped scores or sinks have no SDPA"
        )
        yield f"attention: transformers runs this model's attention eager ({reason})"
    mixers = [kind.mixer for kind in spec.layers.kinds]
    one = any(isinstance(mixer, Attention) and mixer.num_key_value_heads == 1 for mixer in mixers)
    if model_class(spec.architecture).modeling == "falcon" and one:
        yield (
            "attention: Falcon's class always gives SDPA a mask, and with one key and value head for all queries no fused kernel "
            "takes it: PyTorch's plain mathematics keeps all scores in fp32"
        )


def notes(plan: TrainingPlan, spec: ModelSpec) -> Iterator[str]:
    """What an answer says of transformers' program of this model."""
    yield from remarks(spec)
    yield from _attention(plan, spec)
    if plan.implementation == "torchtune":
        yield "torchtune 0.6.1: its full recipes shard embedding and head apart, those of adapters do not (root_group says otherwise)"
    if plan.implementation == "torchtune" and "model" in plan.compile and plan.method != "full":
        yield "compile: layers with adapters are counted as they run eagerly"
