"""Megatron-LM's arguments (megatron/training/arguments.py), as `torchrun ... pretrain_gpt.py` has them."""

from __future__ import annotations

from typing import Any, Final

from calc.errors import InputError
from calc.external_formats.draft import (
    NO_EFFECT,
    Draft,
    NotSaid,
    Setting,
    Table,
    ignores,
    named,
    number,
    one_of,
    refuses,
    sets,
    states,
    switches,
    text,
    truth,
    whole,
)  # fmt: skip
from calc.external_formats.writing import Writing, left_over
from calc.training.plan_fields import RECOMPUTABLE

_MODEL: Final = (
    "num_layers hidden_size ffn_hidden_size num_attention_heads num_query_groups kv_channels vocab_size num_experts max_position_embeddings"
).split()
_MODEL_SWITCHES: Final = (
    "swiglu group_query_attention untie_embeddings_and_output_weights disable_bias_linear add_qkv_bias".split()
)


def _of_model(name: str, read: Any, is_switch: bool = False) -> Setting:
    def apply(draft: Draft, value: Any) -> str:
        found = read(value)
        draft.facts.setdefault("config", {})[name] = found
        return f"the model's {name} {found}"

    return Setting(apply, is_switch)


def _dropout(draft: Draft, value: Any) -> str:
    rate = number(value)
    draft.facts["dropout"] = max(rate, draft.facts.get("dropout", 0.0))
    return "dropout off" if rate == 0 else f"dropout {rate:g}"


def _recompute(draft: Draft, value: Any) -> str:
    draft.plan["recompute"] = one_of({"full": "full", "selective": "selective"}, "not known here")(value)
    return f"recompute {draft.plan['recompute']}"


def _modules(draft: Draft, value: Any) -> str:
    names = value.replace(",", " ").split() if isinstance(value, str) else [str(each) for each in value]
    known = one_of({name: name for name in RECOMPUTABLE}, "not a module known here")
    draft.plan["recompute_modules"] = tuple(known(name) for name in names)
    if names == ["core_attn"]:  # flash attention repeats its scores anyway
        del draft.plan["recompute_modules"]
        return NO_EFFECT
    return f"recompute_modules {','.join(names)}"


def _optimizer(draft: Draft, value: Any) -> str:
    draft.plan["optimizer"] = one_of(
        {"adam": "adamw", "sgd": "sgd", "muon": "muon", "dist_muon": "muon"}, "not modelled"
    )(value)
    return f"optimizer {draft.plan['optimizer']}"


def _layers_of_a_chunk(draft: Draft, value: Any) -> str:
    draft.facts["layers_of_a_chunk"] = whole(value)
    return f"virtual stages of {draft.facts['layers_of_a_chunk']} layers"


def _backend(draft: Draft, value: Any) -> str:
    found = one_of(
        {"auto": None, "flash": "flash", "fused": None, "unfused": "eager", "local": "eager"}, "not known here"
    )(value)
    if found:
        draft.facts["attention"] = found
    return f"attention {found}" if found else NO_EFFECT


def _ramp(draft: Draft, value: Any) -> str:
    raise NotSaid("the batch is taken at its full size")


SETTINGS: Final[Table] = {
    **{name.replace("_", "-"): _of_model(name, whole) for name in _MODEL},
    **{name.replace("_", "-"): _of_model(name, truth, is_switch=True) for name in _MODEL_SWITCHES},
    "normalization": _of_model("normalization", text),
    "position-embedding-type": _of_model("position_embedding_type", text),
    "use-rotary-position-embeddings": _of_model("use_rotary_position_embeddings", truth, is_switch=True),
    "seq-length": sets("seq"),
    "micro-batch-size": sets("micro_batch"),
    "global-batch-size": sets("global_batch"),
    "tensor-model-parallel-size": sets("tp"),
    "pipeline-model-parallel-size": sets("pp"),
    "context-parallel-size": sets("cp"),
    "expert-model-parallel-size": sets("ep"),
    "expert-tensor-parallel-size": refuses("experts are not split by tp", unless=lambda value: str(value) == "1"),
    "num-virtual-stages-per-pipeline-rank": sets("virtual_stages"),
    "num-layers-per-virtual-pipeline-stage": Setting(_layers_of_a_chunk),
    "sequence-parallel": states("sequence_parallel", truth, is_switch=True),
    "use-distributed-optimizer": switches("zero", 1),
    "data-parallel-sharding-strategy": sets(
        "zero", one_of({"no_shard": 0, "optim": 1, "optim_grads": 2, "optim_grads_params": 3}, "not known here")
    ),
    "use-megatron-fsdp": refuses("Megatron's own FSDP is taken as ZeRO; its buffers are not counted", is_switch=True),
    **named("use-torch-fsdp2", switches("zero", 3)),
    "bf16": states("bf16", truth, is_switch=True),
    "fp16": states("fp16", truth, is_switch=True),
    **named("fp8-format fp8-hybrid fp8-e4m3", states("fp8", lambda value: True)),
    "use-precision-aware-optimizer": states("precision_aware", truth, is_switch=True),
    "recompute-granularity": Setting(_recompute),
    "recompute-activations": switches("recompute", "selective"),
    "checkpoint-activations": switches("recompute", "full"),
    "recompute-method": refuses("every layer is recomputed", unless=lambda value: value == "uniform"),
    "recompute-num-layers": refuses("every layer is recomputed by itself", unless=lambda value: str(value) == "1"),
    "recompute-modules": Setting(_modules),
    "decoder-first-pipeline-num-layers": sets("first_stage_layers"),
    "decoder-last-pipeline-num-layers": sets("last_stage_layers"),
    "attention-dropout": Setting(_dropout),
    "hidden-dropout": Setting(_dropout),
    "attention-backend": Setting(_backend),
    "use-flash-attn": states("flash", truth, is_switch=True),
    "optimizer": Setting(_optimizer),
    "transformer-impl": states("implementation", text),
    **named("cross-entropy-loss-fusion", states("fused_loss", truth, is_switch=True)),
    **named("rampup-batch-size step-batch-size-schedule", Setting(_ramp)),
    "cpu-offloading": refuses("offloading is not modelled for Megatron", is_switch=True),
    "optimizer-cpu-offload": refuses("offloading is not modelled for Megatron", is_switch=True),
    "grad-reduce-in-bf16": refuses("main gradients are fp32", is_switch=True),
    "accumulate-allreduce-grads-in-fp32": Setting(lambda draft, value: NO_EFFECT, is_switch=True),
    "fp8-param-gather": refuses("weights are gathered in bf16", is_switch=True),
    "multi-latent-attention": refuses("the model's attention is not read from arguments", is_switch=True),
    **named("moe-layer-freq moe-ffn-hidden-size moe-router-topk moe-shared-expert-intermediate-size mtp-num-layers",
            refuses("experts are not read from arguments; name the model to the command")),
    "overlap-param-gather": Setting(lambda draft, value: NO_EFFECT, is_switch=True),
    **ignores(
        "lr min-lr lr-decay-style lr-warmup-fraction lr-decay-iters lr-warmup-iters lr-decay-samples lr-warmup-samples train-iters "
        "train-samples weight-decay adam-beta1 adam-beta2 adam-eps clip-grad init-method-std data-path vocab-file merge-file split "
        "log-interval save-interval eval-interval eval-iters save load tensorboard-dir tokenizer-type tokenizer-model seed num-workers "
        "data-cache-path rotary-base rotary-percent distributed-backend distributed-timeout-minutes ckpt-format wandb-project "
        "wandb-exp-name wandb-save-dir exit-duration-in-mins loss-scale initial-loss-scale empty-unused-memory-level tiktoken-pattern "
        "profile-step-start profile-step-end decoupled-lr decoupled-min-lr fp8-amax-history-len fp8-amax-compute-algo fp8-margin "
        "make-vocab-size-divisible-by norm-epsilon moe-aux-loss-coeff moe-router-load-balancing-type moe-token-dispatcher-type "
        "manual-gc-interval DDP-impl activations-checkpoint-method dataloader-type fp8-interval start-weight-decay "
        "end-weight-decay weight-decay-incr-style tensorboard-queue-size train-data-path valid-data-path test-data-path "
        "rope-scaling-factor log-num-zeros-in-grad rotary-seq-len-interpolation-factor async-tensor-model-parallel-allreduce"
    ),
    **ignores(
        "use-mcore-models mock-data overlap-grad-reduce no-masked-softmax-fusion no-position-embedding no-load-optim no-load-rng "
        "no-save-optim no-save-rng manual-gc log-throughput profile calculate-per-token-loss no-create-attention-mask-in-dataloader "
        "no-mmap-bin-files apply-layernorm-1p moe-grouped-gemm no-bias-swiglu-fusion no-rope-fusion no-gradient-accumulation-fusion "
        "overlap-p2p-communication use-checkpoint-args auto-detect-ckpt-format attention-softmax-in-fp32 exit-on-missing-checkpoint "
        "log-timers-to-tensorboard log-params-norm log-memory-to-tensorboard apply-query-key-layer-scaling override-opt-param-scheduler "
        "fp16-lm-cross-entropy use-cpu-initialization no-async-tensor-model-parallel-allreduce tp-comm-overlap "
        "no-initialization moe-permute-fusion moe-router-pre-softmax qk-layernorm use-tp-pp-dp-mapping",
        is_switch=True,
    ),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """The model's shape from its arguments, the ranks of torchrun, Megatron's formats."""
    plan, facts = draft.plan, draft.facts
    plan["implementation"] = "paper" if facts.get("implementation") == "local" else "fused"
    plan["recipe"] = _recipe(draft)
    plan.setdefault("zero", 0)
    if facts.get("attention"):
        plan["attention"] = facts["attention"]
    elif facts.get("flash"):
        plan["attention"] = "flash"
    if "dropout" in facts and facts["dropout"] == 0:
        plan["dropout"] = "off"
    if plan.get("tp", 1) > 1:
        plan["sequence_parallel"] = bool(facts.get("sequence_parallel"))
    if facts.get("fused_loss"):
        plan["loss"] = "fused"
    if plan.get("recompute") == "full" or plan["implementation"] != "fused":
        plan.pop("recompute_modules", None)
    _virtual_stages(draft)
    _ranks(draft)
    _model(draft)


def _recipe(draft: Draft) -> str:
    facts = draft.facts
    if facts.get("fp8"):
        return "fp8"
    if facts.get("bf16"):
        return "megatron-precision-aware" if facts.get("precision_aware") else "megatron-bf16"
    return "megatron-fp16" if facts.get("fp16") else "fp32"


def _virtual_stages(draft: Draft) -> None:
    layers, chunk = draft.facts.get("config", {}).get("num_layers"), draft.facts.get("layers_of_a_chunk")
    pp = draft.plan.get("pp", 1)
    if chunk and layers and pp > 1:
        chunks, rest = divmod(layers, max(1, pp * chunk))
        if chunks > 1 and not rest:
            draft.plan["virtual_stages"] = chunks
    if draft.plan.get("virtual_stages", 1) > 1:
        draft.plan["schedule"] = "interleaved"


def _ranks(draft: Draft) -> None:
    plan, facts = draft.plan, draft.facts
    inner = max(1, plan.get("tp", 1) * plan.get("pp", 1) * plan.get("cp", 1))
    stated = bool({"gpus", "gpus_per_node"} & set(facts))
    gpus = draft.whole("gpus", draft.whole("nodes") * draft.whole("gpus_per_node"))
    if stated and gpus >= inner and gpus % inner == 0:
        plan["dp"] = gpus // inner
        return
    plan["dp"] = plan.get("ep", 1)
    why = (
        f"the launcher's {gpus} GPUs are no multiple of tp x pp x cp ({inner})"
        if stated
        else "the text does not say how many GPUs"
    )
    draft.assumed.append(f"dp {plan['dp']}: {why}; --gpus says it")


def _model(draft: Draft) -> None:
    """A config.json of the arguments, where they describe a decoder that is understood."""
    from calc.model.families.other_formats import translated

    config = draft.facts.get("config")
    if draft.model or not config or "num_layers" not in config:
        return
    config = {
        **config,
        "seq_length": draft.plan.get("seq", 2048),
        "max_position_embeddings": config.get("max_position_embeddings"),
    }
    try:
        made, told = translated({name: value for name, value in config.items() if value is not None})
    except InputError as error:
        draft.not_understood.append(f"the model's shape: {error}; name the model to the command")
        return
    draft.facts["model_config"] = dict(made)
    draft.model = "config.json"
    draft.assumed += [
        "model config.json: the arguments' own shape, given as model_config; save it under that name",
        *told,
    ]


_FLAGS: Final = {
    "seq": "--seq-length", "micro_batch": "--micro-batch-size", "tp": "--tensor-model-parallel-size",
    "pp": "--pipeline-model-parallel-size",
    "cp": "--context-parallel-size", "ep": "--expert-model-parallel-size", "virtual_stages": "--num-virtual-stages-per-pipeline-rank",
}  # fmt: skip
_NODE: Final = 8  # GPUs of a machine, as torchrun is told


def write(writing: Writing) -> str:
    """The torchrun command of a plan that Megatron-LM trains. The model's own arguments are the user's to add."""
    plan = writing.plan
    writing.only("implementation", "fused", "paper")
    gpus = plan.gpus
    nodes = gpus // _NODE if gpus % _NODE == 0 else 1
    words = ["torchrun", "--nproc_per_node", str(gpus // nodes), "--nnodes", str(nodes), "pretrain_gpt.py"]
    for name, option in _FLAGS.items():
        if (value := writing.say(name, 1)) != 1:
            words += [option, str(value)]
    words += ["--global-batch-size", str(plan.batch)]
    for name in ("dp", "global_batch", "schedule"):
        writing.say(name, None)
    if plan.schedule not in ("1f1b", "interleaved"):
        writing.unsaid("schedule", "it runs 1f1b, interleaved with virtual stages")
    words += _words_of_state(writing)
    writing.notes.append(
        f"MODEL {writing.model}: add Megatron's arguments of its shape (--num-layers, --hidden-size, ...)"
    )
    return left_over(writing, words)


def _words_of_state(writing: Writing) -> list[str]:
    plan, recipe, zero = writing.plan, writing.say("recipe", ""), writing.say("zero", 0)
    formats = {"megatron-bf16": ["--bf16"], "megatron-fp16": ["--fp16"], "fp8": ["--bf16", "--fp8-format", "hybrid"], "fp32": [],
               "megatron-precision-aware": ["--bf16", "--use-precision-aware-optimizer"]}  # fmt: skip
    words = [*formats[recipe]] if recipe in formats else writing.unsaid("recipe", "Megatron does not have it")
    strategies = {
        1: ["--use-distributed-optimizer"],
        2: ["--data-parallel-sharding-strategy", "optim_grads"],
        3: ["--use-torch-fsdp2"],
    }
    words += strategies.get(zero, [])
    if writing.say("sequence_parallel", plan.tp > 1) and plan.tp > 1:
        words.append("--sequence-parallel")
    recompute = writing.say("recompute", "none")
    words += ["--recompute-granularity", recompute] if recompute != "none" else []
    words += ["--recompute-method", "uniform", "--recompute-num-layers", "1"] if recompute == "full" else []
    if writing.say("dropout", "config") == "off":
        words += ["--attention-dropout", "0.0", "--hidden-dropout", "0.0"]
    attention = writing.say("attention", "sdpa")
    words += ["--attention-backend", {"flash": "flash", "eager": "unfused"}[attention]] if attention != "sdpa" else []
    if writing.say("loss", "full") == "fused":
        words.append("--cross-entropy-loss-fusion")
    if plan.implementation == "paper":
        words += ["--transformer-impl", "local"]
    optimizer = writing.say("optimizer", "adamw")
    return [*words, "--optimizer", {"adamw": "adam"}.get(optimizer, optimizer)] if optimizer != "adamw" else words
