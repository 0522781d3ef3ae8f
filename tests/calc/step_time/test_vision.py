"""Pictures in a step: the tower's FLOPs against PyTorch's counter, and what they cost."""

from __future__ import annotations

import pytest

from calc.catalogue import load
from calc.errors import InputError
from calc.hardware import gpu
from calc.model.config import from_config
from calc.step_time import TimePlan, step_time
from calc.step_time.vision import picture_flops, tower_of, tower_parameters

H100 = gpu("h100-sxm-80gb")
TEXT = {
    "model_type": "llama", "vocab_size": 128, "hidden_size": 96, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 4,
}  # fmt: skip
VISION = {
    "hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 3, "num_attention_heads": 4, "image_size": 28, "patch_size": 7,
}  # fmt: skip
LLAVA = {
    "architectures": ["LlavaForConditionalGeneration"], "model_type": "llava", "image_token_index": 100, "text_config": TEXT,
    "vision_config": VISION | {"model_type": "clip_vision_model", "projection_dim": 64},
}  # fmt: skip
QWEN = {
    "architectures": ["Qwen2VLForConditionalGeneration"], "model_type": "qwen2_vl", **TEXT,
    "vision_config": {
        "model_type": "qwen2_vl", "depth": 3, "embed_dim": 64, "hidden_size": 96, "num_heads": 4, "mlp_ratio": 4, "patch_size": 7,
        "spatial_merge_size": 2, "temporal_patch_size": 2,
    },
}  # fmt: skip


def counted(model, run):
    """FLOPs of a call by PyTorch's counter; attention as its two products."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    counter = FlopCounterMode(display=False)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), counter:
        run(model)
    return counter.get_total_flops()


@pytest.mark.torch
def test_llavas_tower_and_projector_multiply_what_pytorch_counts():
    import torch
    import transformers

    config = transformers.LlavaConfig(**{key: LLAVA[key] for key in ("text_config", "vision_config")})
    model = transformers.LlavaForConditionalGeneration(config)
    pixels = torch.zeros(2, 3, 28, 28)
    found = counted(model, lambda model: model.get_image_features(pixel_values=pixels))
    assert picture_flops(from_config(LLAVA, "x"), TimePlan(picture_patches=16, pictures=2)) == found


@pytest.mark.torch
def test_a_tower_that_merges_patches_multiplies_what_pytorch_counts():
    import torch
    import transformers

    config = transformers.Qwen2VLConfig(
        **{key: value for key, value in QWEN.items() if key not in ("architectures", "model_type")}
    )
    tower = transformers.models.qwen2_vl.modeling_qwen2_vl.Qwen2VisionTransformerPretrainedModel(config.vision_config)
    pixels, grid = torch.zeros(16, 3 * 2 * 7 * 7), torch.tensor([[1, 4, 4]])
    found = counted(tower, lambda tower: tower(pixels, grid_thw=grid))
    spec = from_config(QWEN, "x")
    assert picture_flops(spec, TimePlan(picture_patches=16)) == found
    assert tower_parameters(tower_of(spec)) == sum(weight.numel() for weight in tower.parameters())


def test_pictures_cost_their_flops_on_the_rank_that_embeds_and_are_part_of_the_mfu():
    spec = load("llava-1.5-7b-hf")
    plan = {"dp": 8, "zero": 1, "seq": 1024, "micro_batch": 4, "recipe": "megatron-bf16", "implementation": "fused"}
    text, one, four = (
        step_time(spec, TimePlan(picture_patches=patches, pictures=count, **plan), H100)
        for patches, count in ((0, 1), (576, 1), (576, 4))
    )
    assert text.step_seconds < one.step_seconds < four.step_seconds
    passes = [sum(part.total for part in (x.step.tower.forward, x.step.tower.input_gradient)) for x in (one, four)]
    assert 3 < passes[1] / passes[0] <= 4
    assert one.step.busiest.parameters - text.step.busiest.parameters == tower_parameters(tower_of(spec)) / 8
    done = [x.model_tflops_per_gpu * 8e12 * x.step_seconds for x in (text, one)]
    assert done[1] - done[0] == pytest.approx(3 * 32 * picture_flops(spec, one.plan), rel=1e-9)
    split = TimePlan(
        picture_patches=576, pp=2, global_batch=32, seq=1024, recipe="megatron-bf16", implementation="fused"
    )
    first, second = step_time(spec, split, H100).step.ranks
    assert first.ends.forward.families["gemms"] > second.ends.forward.families["gemms"] > 0


def test_a_model_without_a_tower_of_patches_is_refused():
    with pytest.raises(InputError, match="picture_patches"):
        step_time(load("meta-llama-3-8b"), TimePlan(picture_patches=576), H100)
