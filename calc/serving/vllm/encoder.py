"""What the profile of a model with pictures holds besides the text's step: the encoder's outputs and its inputs."""

from __future__ import annotations

from calc.breakdown import Component, Formula
from calc.model.spec import ModelSpec, Tower
from calc.model.weights import Weight
from calc.serving.plan import ServingPlan

_SOURCE = (
    "vllm/v1/worker/gpu_model_runner.py, profile_run: the outputs stay in the encoder's cache through the text's step"
)
_URL = "https://github.com/vllm-project/vllm"
_LARGEST_PICTURE = (
    16_384  # tokens of the largest picture of an encoder of any size (Qwen2-VL's max_pixels, 28 x 28 a token)
)


def encoder(spec: ModelSpec, plan: ServingPlan, tokens: int) -> tuple[Component, ...]:
    """Outputs and pixels of as many pictures as a step's tokens hold; () for a model without pictures, or where the plan allows none."""
    towers = [tower for tower in spec.towers if tower.in_total and _patch(tower)]
    if not towers or plan.images == 0:
        return ()
    tower = towers[0]
    patch = _patch(tower)
    assert patch
    budget = tokens if _weight(tower, "position") else max(tokens, _LARGEST_PICTURE)
    merged = _merged(tower)
    outputs = Formula(r"<T_e> \cdot <h> \cdot 2", _SOURCE, _URL, ("as many tokens of pictures as a step takes",))
    pixels = Formula(
        r"<T_e> \cdot <m> \cdot <p> \cdot 2",
        _SOURCE,
        _URL,
        ("m: patches a token, as the merger tells; 1 where none does",),
    )
    numbers = {"T_e": budget, "h": spec.hidden_size}
    inputs = {"T_e": budget, "m": merged, "p": patch.shape[1].size}
    return (
        Component("encoder_outputs", 2 * budget * spec.hidden_size, formula=outputs, numbers=numbers),
        Component("encoder_inputs", 2 * budget * merged * patch.shape[1].size, formula=pixels, numbers=inputs),
    )


def _weight(tower: Tower, name: str) -> Weight | None:
    return next((weight for part in tower.parts for weight in part.weights if weight.name == name), None)


def _patch(tower: Tower) -> Weight | None:
    """The convolution over patches, of shape (features, elements of a patch)."""
    found = _weight(tower, "patch")
    return found if found and len(found.shape) == 2 else None


def _merged(tower: Tower) -> int:
    """How many patches become one token."""
    patch, up = _patch(tower), _weight(tower, "up")
    return max(1, up.shape[1].size // patch.shape[0].size) if patch and up and len(up.shape) == 2 else 1
