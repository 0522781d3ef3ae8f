"""What the profile of a model with pictures takes besides the text's step: the encoder's pass over as many pictures as a step holds,
and its outputs, which stay through the text's step."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Weight
from calc.serving.plan import ServingPlan
from calc.units import round_up

_RUNNER = (
    "vllm/v1/worker/gpu_model_runner.py, profile_run: the outputs stay in the encoder's cache through the text's step"
)
_BLOCK = "vllm/model_executor/models (qwen2_vl.py, siglip.py, clip.py): the tensors that live at once in a block"
_TILED = "vllm/model_executor/models/mllama.py and worker/enc_dec_model_runner.py, 0.6.6: the tensors that live at once"
_URL = "https://github.com/vllm-project/vllm"
_LARGEST_PICTURE = (
    16_384  # tokens of the largest picture of an encoder of any size (Qwen2-VL's max_pixels, 28 x 28 a token)
)
Parts = tuple[Component, ...]


def encoder(spec: ModelSpec, plan: ServingPlan, tokens: int, sequences: int) -> tuple[Parts, Parts]:
    """(what the encoder's pass takes at its highest, what of it stays through the text's step), where a step takes so many tokens and
    sequences; empty for a model without pictures, or where the plan allows none."""
    tower = next((tower for tower in spec.towers if tower.in_total and _patch(tower)), None)
    if tower is None or plan.images == 0:
        return (), ()
    if _weight(tower, "tile_position"):
        return _tiled(tower, sequences), ()
    kept = _kept(spec, tower, _budget(tower, tokens))
    return (*_block(tower, _budget(tower, tokens)), *kept), kept


def _budget(tower: Tower, tokens: int) -> int:
    """Tokens of pictures in one pass: those of a step, and at least one picture; of an encoder of any size that is a large one."""
    any_size = _weight(tower, "position") is None or any(
        getattr(kind.mixer, "rotary", False) for kind in tower.stack.kinds
    )
    return max(tokens, _LARGEST_PICTURE) if any_size else tokens


def _kept(spec: ModelSpec, tower: Tower, budget: int) -> Parts:
    """The outputs, and the pixels that the caller holds."""
    patch = _patch(tower)
    assert patch
    merged = _merged(tower)
    outputs = Formula(r"<T_e> \cdot <h> \cdot 2", _RUNNER, _URL, ("as many tokens of pictures as a step takes",))
    pixels = Formula(
        r"<T_e> \cdot <m> \cdot <p> \cdot 2",
        _RUNNER,
        _URL,
        ("m: patches a token, as the merger tells; 1 where none does",),
    )
    numbers = {"T_e": budget, "h": spec.hidden_size}
    inputs = {"T_e": budget, "m": merged, "p": patch.shape[1].size}
    return (
        Component("encoder_outputs", 2 * budget * spec.hidden_size, formula=outputs, numbers=numbers),
        Component("encoder_inputs", 2 * budget * merged * patch.shape[1].size, formula=pixels, numbers=inputs),
    )


def _block(tower: Tower, budget: int) -> Parts:
    """A block at its activation: what its caller holds, the residual and the normed input, the feed-forward before and after."""
    patch = _patch(tower)
    assert patch
    hidden, inner = patch.shape[0].size, 0
    for kind in tower.stack.kinds:
        size = getattr(kind.feed_forward, "intermediate_size", 0)
        inner = max(inner, size * (3 if getattr(kind.feed_forward, "gated", False) else 2))
    patches = budget * _merged(tower)
    formula = Formula(
        r"<N> \cdot (3 \cdot <h> + <w>) \cdot 2", _BLOCK, _URL, ("w: gate, up and their product, or up twice",)
    )
    numbers = {"N": patches, "h": hidden, "w": inner}
    return (Component("encoder_block", 2 * patches * (3 * hidden + inner), formula=formula, numbers=numbers),)


def _tiled(tower: Tower, sequences: int) -> Parts:
    """The encoder of Llama 3.2 Vision over a picture of all tiles for each sequence, at the activation of its second stack.

    There live, of every padded token: the states that the first stack kept, once as a list and once stacked, its last, the second
    stack's input and its layer's, the residual, the normed input, and the feed-forward before and after its activation; of every patch
    its embedding; the pixels in fp32 as they came and as they were sorted; and a mask of all tokens by all tokens.
    """
    patch, position, tiled, projection = (
        _named(tower, name) for name in ("patch", "position", "tile_position", "projection")
    )
    hidden, pixels = patch.shape[0].size, patch.shape[1].size
    tokens = position.shape[0].size
    tiles = tiled.shape[1].size // (tokens * hidden)
    padded, kept = round_up(tokens, 8), projection.shape[1].size // hidden - 1
    inner = max(getattr(kind.feed_forward, "intermediate_size", 0) for kind in tower.stack.kinds)
    pictures = {"B": sequences, "n": tiles}
    assumes = ("a picture of all tiles for each of max_seqs sequences",)
    states = Formula(
        r"<B> \cdot <n> \cdot (<s> \cdot (<k> \cdot <h> + 2 \cdot <f>) + (<N> - 1) \cdot <h>) \cdot 2",
        _TILED,
        _URL,
        assumes,
    )
    live = 2 * kept + 5
    value = 2 * sequences * tiles * (padded * (live * hidden + 2 * inner) + (tokens - 1) * hidden)
    numbers = {**pictures, "s": padded, "k": live, "h": hidden, "f": inner, "N": tokens}
    mask = Formula(r"<B> \cdot (<n> \cdot <s>)^{2} \cdot 2", _TILED, _URL, assumes)
    raw = Formula(r"2 \cdot <B> \cdot <n> \cdot (<N> - 1) \cdot <p> \cdot 4", _TILED, _URL, assumes)
    return (
        Component("encoder_states", value, formula=states, numbers=numbers),
        Component(
            "encoder_mask", 2 * sequences * (tiles * padded) ** 2, formula=mask, numbers={**pictures, "s": padded}
        ),
        Component(
            "encoder_inputs",
            8 * sequences * tiles * (tokens - 1) * pixels,
            formula=raw,
            numbers={**pictures, "N": tokens, "p": pixels},
        ),
    )


def _weight(tower: Tower, name: str) -> Weight | None:
    return next((weight for part in tower.parts for weight in part.weights if weight.name == name), None)


def _named(tower: Tower, name: str) -> Weight:
    found = _weight(tower, name)
    assert found
    return found


def _patch(tower: Tower) -> Weight | None:
    """The convolution over patches, of shape (features, elements of a patch)."""
    found = _weight(tower, "patch")
    return found if found and len(found.shape) == 2 else None


def _merged(tower: Tower) -> int:
    """How many patches become one token."""
    patch, up = _patch(tower), _weight(tower, "up") or _weight(tower, "projection")
    return max(1, up.shape[1].size // patch.shape[0].size) if patch and up and len(up.shape) == 2 else 1
