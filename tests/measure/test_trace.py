"""The trace's machinery: against PyTorch's own tracker, against itself run whole, and against PyTorch's own lists."""

import re
from pathlib import Path

import pytest

from calc.errors import InputError
from measure.trace import TraceOptions, trace_step

pytestmark = pytest.mark.torch

SMALL = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 5,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
}
LLAMA = {"model_type": "llama", **SMALL}
GEMMA3 = {
    "model_type": "gemma3_text",
    **SMALL,
    "num_hidden_layers": 8,
    "head_dim": 64,
    "sliding_window": 64,
    "sliding_window_pattern": 3,
}
DEEPSEEK = {
    "model_type": "deepseek_v3",
    **SMALL,
    "num_key_value_heads": 8,
    "q_lora_rank": 64,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 16,
    "qk_nope_head_dim": 32,
    "v_head_dim": 32,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "n_group": 2,
    "topk_group": 1,
    "moe_intermediate_size": 128,
    "first_k_dense_replace": 2,
}
TINY = {**LLAMA, "num_hidden_layers": 1}
GPT2 = {"model_type": "gpt2", "n_embd": 256, "n_layer": 3, "n_head": 8, "vocab_size": 1000, "n_positions": 512}


def traced(config, **options):
    return trace_step(config, TraceOptions(**{"seq": 256, "micro_batch": 2, **options}))


def test_the_peak_is_that_of_pytorchs_own_tracker():
    """torch.distributed's MemTracker, run over the same step, sees the same bytes to the last one."""
    import torch
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed._tools.mem_tracker import MemTracker

    from measure.trace.cuda import cuda_choices
    from measure.trace.model import build, materialize, quiet

    options = TraceOptions(seq=256, micro_batch=2, rounding=1, layers=0)
    result = trace_step(LLAMA, options)
    with quiet(), cuda_choices():
        model = build(LLAMA, options)
        with FakeTensorMode():
            materialize(model)
            optimizer = torch.optim.AdamW(model.parameters(), foreach=True)
            tokens = torch.zeros((2, 256), dtype=torch.int64)
            tracker = MemTracker()
            tracker.track_external(model, optimizer, tokens)
            with tracker:
                for _ in range(2):
                    optimizer.zero_grad()
                    loss = model(input_ids=tokens, labels=tokens, use_cache=False).loss
                    kept = tracker.get_tracker_snapshot("current")[torch.device("cpu")]
                    loss.backward()
                    optimizer.step()
                    tracker.reset_mod_stats()
                peak = tracker.get_tracker_snapshot("peak")[torch.device("cpu")]
    counters = 4 * len(list(model.parameters()))  # AdamW's step counters, which live on the host
    states = result.parameters_bytes + result.optimizer_bytes
    assert peak["Total"] == result.peak_bytes + counters
    assert kept["Total"] == states + result.activations_bytes + counters


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("config", "options"),
    [
        (LLAMA, {"accumulation": 3, "optimizer_kernel": "loop"}),
        (LLAMA, {"recipe": "amp", "recompute": "full"}),
        (LLAMA, {"optimizer": "adafactor"}),
        (LLAMA, {"method": "dora", "optimizer_kernel": "fused"}),
        (GEMMA3, {}),
        (DEEPSEEK, {}),
    ],
)
def test_layers_laid_together_are_the_model_run_whole(config, options):
    short, whole = traced(config, **options), traced(config, layers=0, **options)
    assert short.layers_run < short.layers == whole.layers_run
    assert dict(short.phases) == dict(whole.phases)
    assert dict(short.alive) == dict(whole.alive)
    for name in ("parameters_bytes", "gradients_bytes", "optimizer_bytes", "activations_bytes"):
        assert getattr(short, name) == getattr(whole, name)


# what torch's documentation says each optimizer keeps for a parameter, in copies of it (besides scalars)
@pytest.mark.sampled(4)
@pytest.mark.parametrize(
    ("optimizer", "copies"),
    [
        ("adam", 2),
        ("sgd", 0),
        ("momentum", 1),
        ("adagrad", 1),
        ("adadelta", 2),
        ("adamax", 2),
        ("asgd", 1),
        ("nadam", 2),
        ("radam", 2),
        ("rmsprop", 1),
        ("rprop", 2),
    ],
)
def test_an_optimizer_of_torch_steps_and_keeps_its_copies(optimizer, copies):
    result = traced(TINY, seq=16, rounding=1, optimizer=optimizer)
    assert result.optimizer_bytes // result.parameters_bytes == copies


def test_parts_sum_to_the_peak_and_the_ledger_to_the_activations():
    result = traced(DEEPSEEK, recipe="amp")
    assert result.breakdown().total == result.peak_bytes == max(result.phases.values())
    assert sum(row.nbytes * row.count for row in result.saved) == result.activations_bytes
    assert sum(row["value"] for row in result.as_dict()["components"]) == result.peak_bytes


def test_states_are_what_the_recipe_says():
    result = traced(LLAMA, rounding=1, recipe="amp", optimizer="momentum")
    count = 4 * (256 * (256 + 128 + 128 + 256) + 3 * 256 * 512 + 2 * 256) * 5 // 4 + 2 * 1000 * 256 + 256
    assert result.parameters_bytes == result.gradients_bytes == result.optimizer_bytes == 4 * count


def test_foreach_holds_one_copy_of_the_second_moment_loop_two_of_the_largest_tensor_fused_none():
    temporaries = {}
    for kernel in ("foreach", "loop", "fused"):
        result = traced(TINY, seq=16, micro_batch=1, rounding=1, optimizer_kernel=kernel)
        states = result.parameters_bytes + result.gradients_bytes + result.optimizer_bytes
        temporaries[kernel] = result.phases["step"] - states
    rest = temporaries["fused"]
    assert temporaries["foreach"] - rest == result.parameters_bytes
    last_norm = 2 * 256  # the divisor of the parameter before the head is still bound to its name
    assert temporaries["loop"] - rest == 2 * (2 * 1000 * 256) + last_norm


def test_a_second_micro_batch_runs_next_to_the_gradients_of_the_first():
    once, twice = traced(LLAMA), traced(LLAMA, accumulation=2)
    assert abs(twice.phases["forward"] - once.phases["forward"] - once.gradients_bytes) <= 512  # and the scaled loss
    assert twice.phases["backward"] > once.phases["backward"]


def test_dropout_keeps_a_mask_of_one_byte_an_element_as_cuda_does():
    masks = [row for row in traced(GPT2).saved if row.dtype == "bool" and row.op == "native_dropout" and row.layer == 1]
    assert [row.nbytes for row in masks] == [2 * 256 * 256] * 2  # after attention and after the MLP
    assert not [row for row in traced(GPT2, dropout="off").saved if row.op == "native_dropout"]


def test_autocast_runs_norms_in_fp32_as_cuda_does():
    norms = [row for row in traced(GPT2, recipe="amp", dropout="off").saved if row.module == "ln_1" and row.layer == 1]
    assert {row.dtype for row in norms} == {"float32"}


def test_no_operator_stays_overridden_after_a_trace():
    import torch

    traced(LLAMA)
    for name in ("layer_norm", "softmax.int", "scaled_dot_product_attention", "dropout"):
        key = "AutogradCPU" if name in ("scaled_dot_product_attention", "dropout") else "AutocastCPU"
        assert not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", key)


def test_the_autocast_lists_are_those_of_pytorchs_header():
    import torch

    from measure.trace.cuda import FP32_OPERATORS, FP32_OUTPUT_OPERATORS

    header = (Path(torch.__file__).parent / "include/ATen/autocast_mode.h").read_text()

    def listed(macro):
        body = re.search(rf"#define {macro}\(_\)(.*?)\n\n", header, re.S)[1]
        return {".".join(match.split(", ")) for match in re.findall(r"_\(([\w, ]+)\)", body)}

    def on_cpu(name):
        return torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU")

    unused = {"dist", "pdist", "cdist", "renorm", "frobenius_norm.dim", "nuclear_norm", "nuclear_norm.dim"}
    wanted = {name for name in listed("AT_FORALL_FP32") if not on_cpu(name)} - unused
    losses = {name for name in wanted if name.endswith("_loss") or name.startswith(("binary", "upsample", "_upsample"))}
    assert wanted - losses <= set(FP32_OPERATORS) <= listed("AT_FORALL_FP32")
    outputs = {name for name in listed("AT_FORALL_FP32_SET_OPT_DTYPE") if not name.startswith("linalg")}
    assert outputs == set(FP32_OUTPUT_OPERATORS)


def test_the_attention_kernel_is_the_one_that_cuda_picks():
    import torch

    from measure.trace.cuda import choose_kernel

    def kernel(dtype, heads, kv_heads, head, value_head, mask=False):
        query, key = (
            torch.empty(1, heads, 8, head, dtype=dtype, device="meta"),
            torch.empty(1, kv_heads, 8, head, dtype=dtype, device="meta"),
        )
        value = torch.empty(1, kv_heads, 8, value_head, dtype=dtype, device="meta")
        return choose_kernel(query, key, value, torch.empty(8, 8, device="meta") if mask else None)

    assert kernel(torch.bfloat16, 8, 2, 128, 128) == "flash"
    assert kernel(torch.bfloat16, 8, 8, 128, 128, mask=True) == "efficient"
    assert kernel(torch.bfloat16, 8, 8, 192, 128) == "efficient"
    assert kernel(torch.bfloat16, 8, 8, 320, 320) == "efficient"
    assert kernel(torch.float32, 8, 8, 128, 128) == "efficient"
    assert kernel(torch.float32, 8, 2, 128, 128) == "math"
    assert kernel(torch.bfloat16, 8, 2, 128, 128, mask=True) == "math"


@pytest.mark.parametrize(
    ("config", "options", "message"),
    [
        ({"hidden_size": 4}, {}, "model_type: None is not allowed"),
        ({"model_type": "no-such-model"}, {}, "does not know this model"),
        ({**LLAMA, "num_attention_heads": 7}, {}, "cannot read it|cannot build LlamaForCausalLM"),
        (GPT2, {"seq": 513}, "512 learned positions"),
        ({"model_type": "gpt_oss", **SMALL, "num_local_experts": 4}, {"attention": "sdpa"}, "use eager"),
        (LLAMA, {"optimizer": "lion"}, "optimizer: 'lion' is not allowed"),
        (LLAMA, {"optimizer": "adamax", "optimizer_kernel": "fused"}, "no fused adamax"),
        (LLAMA, {"method": "lora", "lora_targets": ("nothing",)}, "lora_targets: peft cannot place adapters"),
    ],
)
def test_what_cannot_be_built_or_run_is_one_clear_complaint(config, options, message):
    with pytest.raises(InputError, match=message) as caught:
        traced(config, **options)
    assert "\n" not in str(caught.value)
