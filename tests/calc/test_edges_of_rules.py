"""Rules where they change over: a remainder, a size that is just the limit, a default that nothing else shows."""

import json
from itertools import pairwise

import numpy as np
import pytest

from calc.catalogue import load_config
from calc.cli import run
from calc.errors import InputError
from calc.flops.per_token import core_flops
from calc.kernel_times.work import context_attention
from calc.model.bare import BareModelPlan
from calc.model.config import LARGEST_CONFIG, from_config, parse_config
from calc.model.mixers import Attention
from calc.model.positions import scaled_positions
from calc.pipeline import in_flight
from calc.serving.plan import ServingPlan
from calc.serving.vllm.blocks import Kind, pool_of
from calc.sources.files import LARGEST_YAML, open_plain, parse_yaml
from calc.training import TrainingPlan
from calc.training.overhead import NCCL_GROUP, NCCL_PAIR, overhead
from tests.calc.test_pipeline import answer as pipeline


def ask(*words):
    return json.loads(run([*words, "--format", "json"]))


@pytest.mark.parametrize(("seq", "chunk"), [(20, 8), (24, 8), (9, 8), (8, 8), (7, 8)])
def test_the_last_chunk_of_attention_is_only_as_long_as_what_is_left(seq, chunk):
    mixer = Attention(4 * seq, num_attention_heads=seq, num_key_value_heads=1, head_dim=4, v_head_dim=4, chunk=chunk)
    starts = [*range(0, seq, chunk), seq]
    pairs = sum((end - start) ** 2 for start, end in pairwise(starts))
    assert core_flops(mixer, seq, causal=False) * seq == 4 * seq * 4 * pairs


def test_power_drawn_is_a_share_of_the_boards():
    words = ("compute", "llama-2-7b", "--gpu", "h100-sxm-80gb", "--tokens", "1e9", "--mfu", "0.4", "--pue", "1.25")
    for share in (1.0, 0.5):
        found = ask(*words, "--power-utilization", str(share))
        assert found["energy_kwh"] == pytest.approx(found["gpu_hours"] * 0.7 * share * 1.25, rel=1e-12)


def test_recomputing_the_scores_repeats_those_of_cross_attention_too(tmp_path):
    """Three decoder layers whose own scores are causal and who meet all 16 positions of an encoder of two layers."""
    config = {
        "architectures": ["BartForConditionalGeneration"],
        "model_type": "bart",
        "d_model": 64,
        "encoder_layers": 2,
        "decoder_layers": 3,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 128,
        "decoder_ffn_dim": 128,
        "vocab_size": 96,
        "max_position_embeddings": 32,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    whole = 4 * 64 * 16  # of one layer's scores and values, a token; causal: half
    found = ask("compute", str(tmp_path), "--seq", "16", "--tokens", "1000", "--recompute", "selective")
    assert found["attention_flops_per_token"] == 2 * whole + 3 * (whole // 2 + whole)
    assert found["hardware_flops"] - found["training_flops"] == 1000 * found["attention_flops_per_token"]


@pytest.mark.parametrize("stages", [2, 3, 4, 5])
def test_zb_h2_holds_every_micro_batch_up_to_two_less_than_twice_the_stages(stages):
    for microbatches in (2 * stages - 3, 2 * stages - 2, 2 * stages - 1, 2 * stages):
        held = min(microbatches, 2 * stages - 1)
        assert in_flight("zb-h2", stages, microbatches) == (held,) * stages
        assert pipeline("zb-h2", stages, microbatches).in_flight == (held,) * stages


@pytest.mark.parametrize(
    ("freq", "offset", "wanted"),
    [
        (4, 2, "FFSSSFSSSF"),
        (4, 3, "FFFSSSFSSS"),
        (1, 2, "FFFFFFFFFF"),
        (3, 0, "SSFSSFSSFS"),
    ],
)
def test_glm_5_chooses_anew_in_the_first_layers_and_every_so_many_after(freq, offset, wanted):
    config = {
        **{key: value for key, value in load_config("glm-5").items() if key not in ("indexer_types", "layer_types")},
        "num_hidden_layers": 10,
        "index_topk_freq": freq,
        "index_skip_topk_offset": offset,
    }
    spec = from_config(config)
    assert "".join("F" if layer.mixer.indexer else "S" for layer in spec.layers)[:10] == wanted


@pytest.mark.parametrize(
    ("width", "multiple", "factor", "wanted"),
    [
        (1000, 256, 1.0, 768),
        (1152, 256, 1.0, 768),
        (1153, 256, 1.0, 768),
        (1155, 256, 1.0, 1024),
        (1000, 256, 1.3, 1024),
        (1000, 1, 1.3, 865),
    ],
)
def test_lfm2s_width_is_cut_before_it_is_scaled_and_rounded_up(width, multiple, factor, wanted):
    """int(2 / 3 width), then int(factor times that), then up to the multiple (transformers, modeling_lfm2.py, Lfm2MLP)."""
    from calc.model.families.lfm2_rwkv_kimi_linear import lfm2_width
    from calc.model.fields import Fields

    config = {"block_ff_dim": width, "block_multiple_of": multiple, "block_ffn_dim_multiplier": factor}
    assert lfm2_width(Fields(config)) == wanted


def test_nvme_is_as_slow_as_its_source_says_where_no_rate_is_given():
    words = (
        "train",
        "llama-2-7b",
        "--zero",
        "3",
        "--dp",
        "2",
        "--implementation",
        "hf",
        "--offload",
        "optimizer",
        "--nvme",
    )
    found = ask(*words)
    moved = found["transfer_bytes"]["nvme_read"] + found["transfer_bytes"]["nvme_written"]
    assert moved
    assert found["nvme_seconds"] == pytest.approx(moved / 1.6e9, rel=1e-12)


def test_sizes_just_over_the_limit_are_refused_and_the_limit_itself_is_not(tmp_path):
    text = b'{"a": 1}'
    assert parse_config(text + b" " * (LARGEST_CONFIG - len(text))) == {"a": 1}
    with pytest.raises(InputError, match="too large"):
        parse_config(text + b" " * (LARGEST_CONFIG - len(text) + 1))
    assert parse_yaml(b"a: 1" + b"\n" * (LARGEST_YAML - 4)) == {"a": 1}
    with pytest.raises(InputError, match="too large"):
        parse_yaml(b"a: 1" + b"\n" * (LARGEST_YAML - 3))
    path = tmp_path / "file"
    path.write_bytes(b"12345")
    with open_plain(path, 5) as (_, size):
        assert size == 5
    with pytest.raises(InputError, match="at most 4"), open_plain(path, 4):
        pass


@pytest.mark.parametrize(
    ("layers", "group"),
    [((2, 3), 2), ((4, 5), 5), ((10, 14), 14), ((10, 15), 10), ((10, 16), 10)],
)
def test_vllm_pads_groups_of_layers_to_the_larger_only_below_one_and_a_half(layers, group):
    """`max_num_layers < min_num_layers * 1.5` (vllm/v1/core/kv_cache_utils.py)."""
    kinds = tuple(
        Kind(rule, most, 1024, count)
        for (rule, most), count in zip((("full", 0), ("window", 512)), layers, strict=True)
    )
    assert pool_of(kinds, ServingPlan(engine="vllm", block_size=16, context=4096), 1).block_bytes == group * 16 * 1024


@pytest.mark.parametrize(
    ("degrees", "pairs", "groups"),
    [
        ({}, 0, 0),
        ({"dp": 2}, 1, 0),
        ({"cp": 2}, 2, 0),
        ({"cp": 4}, 0, 2),
        ({"cp": 2, "dp": 2}, 1, 1),
        ({"tp": 2, "cp": 2}, 3, 0),
    ],
)
def test_context_parallel_ranks_are_a_communicator_of_their_own_and_join_the_data_parallel_one(degrees, pairs, groups):
    plan = TrainingPlan(seq=2048, **degrees)
    assert overhead(plan, None, 0).nccl == pairs * NCCL_PAIR + groups * NCCL_GROUP


def test_mamba_2_scans_as_many_flops_as_counted_by_hand(tmp_path):
    """A layer of 2 heads of 32 with a state of 16: its update is 5 FLOPs an element, the convolution 2 a tap, the gate 2."""
    config = {
        "architectures": ["Mamba2ForCausalLM"],
        "model_type": "mamba2",
        "hidden_size": 32,
        "expand": 2,
        "num_heads": 2,
        "head_dim": 32,
        "state_size": 16,
        "n_groups": 1,
        "conv_kernel": 4,
        "num_hidden_layers": 1,
        "vocab_size": 96,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    found = ask("compute", str(tmp_path), "--seq", "64", "--tokens", "1")
    inner, mixed = 2 * 32, 2 * 32 + 2 * 16
    scan = 5 * inner * 16 + 2 * 4 * mixed + 2 * inner
    matmuls = 2 * (32 * (inner + mixed + 2) + inner * 32 + 32 * 96)
    assert found["forward_flops_per_token"] == matmuls + scan == 26_624


def test_attention_is_masked_by_its_window_where_that_is_as_long_as_the_sequence(tmp_path):
    """transformers leaves the mask out only where there are fewer keys than the window has (masking_utils.py)."""
    config = {
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 96,
        "max_position_embeddings": 4096,
        "sliding_window": 256,
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    for seq, masked in ((255, False), (256, True), (257, True)):
        components = ask("train", str(tmp_path), "--seq", str(seq), "--implementation", "hf")["components"]
        assert any("mask" in each["path"] for each in components) == masked, seq


@pytest.mark.parametrize("key", ["type", "rope_type"])
def test_positions_are_stretched_by_either_name_of_the_kind(key):
    group = {key: "yarn", "factor": 4.0, "original_max_position_embeddings": 1000}
    assert scaled_positions({"rope_scaling": group}, 8192) == 4000
    assert scaled_positions({"rope_scaling": {**group, key: "linear"}}, 8192) == 32768


def test_a_bare_model_has_at_most_10_000_layers():
    assert BareModelPlan.model_fields["num_hidden_layers"].metadata[1].le == 10_000


def test_deepspeed_refuses_even_two_replicas():
    words = ["train", "llama-2-7b", "--implementation", "deepspeed", "--recipe", "mixed-16", "--zero", "3"]
    with pytest.raises(InputError, match=r"dp_replicate \(2\) must be 1"):
        run([*words, "--dp", "4", "--dp-replicate", "2"])


def test_torchtitan_is_told_to_recompute_every_second_layer():
    words = "to torchtitan llama-2-7b --implementation torchtitan --recipe fsdp-bf16 --dp 8 --zero 3 --recompute full --recompute-every 2"
    text = run(words.split())
    assert 'selective_ac_option = "2"' in text


@pytest.mark.parametrize(("context", "window", "keys"), [(0, 0, 64), (100, 0, 164), (100, 50, 114), (20, 50, 84)])
def test_a_prompts_attention_reads_each_key_it_sees_once(context, window, keys):
    """One head of 8 in 16 bits: query and output of 64 tokens, then every key and value that any of them sees."""
    work = context_attention(1, 64, context, 1, 1, 8, window, "bf16", causal=True)
    assert float(np.asarray(work.bytes)) == 4 * 64 * 8 + 2 * 2 * keys * 8
