"""torchtitan's TOML job configs (torchtitan/config/job_config.py), and its flags, `--training.seq_len 8192`."""

from __future__ import annotations

import json
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
    one_of,
    refuses,
    sets,
    states,
    text,
    truth,
    whole,
)  # fmt: skip
from calc.external_formats.named_files import take_file
from calc.external_formats.writing import Writing, note_rest

# name and flavor of a model as the catalogue has it (torchtitan/models/*/__init__.py)
_FLAVORS: Final = {
    ("llama3", "8B"): "meta-llama-3.1-8b", ("llama3", "70B"): "meta-llama-3.1-70b", ("llama3", "405B"): "meta-llama-3.1-405b",
    ("deepseek_v3", "671B"): "deepseek-v3", ("qwen3", "8B"): "qwen3-8b",
}  # fmt: skip
_SCHEDULES: Final = {
    "1F1B": "1f1b", "GPipe": "gpipe", "Interleaved1F1B": "interleaved", "InterleavedZeroBubble": "interleaved-zb", "ZBVZeroBubble": "zb-v",
    "LoopedBFS": "looped-bfs", "DualPipeV": "dualpipe-v",
}  # fmt: skip


def _degree(name: str) -> Setting:
    """A degree that may be -1: whatever ranks are left."""

    def apply(draft: Draft, value: Any) -> str:
        degree = whole(value)
        if degree == -1:
            return "whatever ranks are left"
        draft.facts[name] = degree
        return f"{name.replace('_', ' ')} {degree}"

    return Setting(apply)


_FLOAT8_CONVERTERS: Final = {"float8", "quantize.linear.float8", "quantize.dense.float8"}


def _converters(draft: Draft, value: Any) -> str:
    names = {part.strip() for part in value.split(",")} if isinstance(value, str) else {*value}
    if not names - {""}:
        return NO_EFFECT
    if not names <= _FLOAT8_CONVERTERS:
        raise NotSaid("converted layers other than float8 (mx) are not modelled for torchtitan")
    draft.plan.setdefault("float8", "tensorwise")
    return f"float8 {draft.plan['float8']}"


def _compile(draft: Draft, value: Any) -> str:
    if not truth(value):
        return NO_EFFECT
    draft.facts["compile"] = True
    return "compile"


def _components(draft: Draft, value: Any) -> str:
    names = [part.strip() for part in value.split(",")] if isinstance(value, str) else list(value)
    draft.facts["components"] = [one_of({"model": "model", "loss": "loss"}, "model or loss")(name) for name in names]
    return f"compile {','.join(names)}"


def _all_gather(draft: Draft, value: Any) -> str:
    if not truth(value):
        return NO_EFFECT
    draft.plan["float8_all_gather"] = True
    return "float8_all_gather"


def _every(draft: Draft, value: Any) -> str:
    if value == "op":
        return NO_EFFECT
    draft.facts["every"] = whole(value)
    return f"recompute_every {draft.facts['every']}"


def _recompute(draft: Draft, value: Any) -> str:
    draft.plan["recompute"] = one_of(
        {"none": "none", "selective": "selective", "full": "full"}, "not a mode known here"
    )(value)
    return f"recompute {draft.plan['recompute']}"


def _reshard(draft: Draft, value: Any) -> str:
    policy = one_of({"default": "default", "never": "never", "always": "always"}, "not a policy known here")(value)
    if policy == "never":
        draft.plan["reshard_after_forward"] = False
    return NO_EFFECT if policy == "default" else f"reshard_after_forward {policy == 'always'}"


def _batch(draft: Draft, value: Any) -> str:
    size = whole(value)
    if size == -1:
        return NO_EFFECT
    draft.plan["global_batch"] = size
    return f"global_batch {size}"


def _optimizer(draft: Draft, value: Any) -> str:
    draft.plan["optimizer"] = one_of(
        {"adam": "adamw", "adamw": "adamw", "muon": "muon"}, "this optimizer is not modelled"
    )(value)
    return f"optimizer {draft.plan['optimizer']}"


def _kernel(draft: Draft, value: Any) -> str:
    known = {"fused": "fused", "foreach": "foreach", "for-loop": "loop"}
    draft.plan["optimizer_kernel"] = one_of(known, "the step inside backward is not modelled for torchtitan")(value)
    return f"optimizer_kernel {draft.plan['optimizer_kernel']}"


SETTINGS: Final[Table] = {
    "model.name": states("name", text),
    "model.flavor": states("flavor", text),
    **named("model.hf-assets-path model.tokenizer-path", states("assets", text)),
    "model.converters": Setting(_converters),
    "optimizer.name": Setting(_optimizer),
    "optimizer.implementation": Setting(_kernel),
    **named("training.local-batch-size training.batch-size", sets("micro_batch")),
    "training.global-batch-size": Setting(_batch),
    "training.seq-len": sets("seq"),
    "training.mixed-precision-param": refuses("weights are gathered in bf16", unless=lambda value: value == "bfloat16"),
    "training.mixed-precision-reduce": refuses("gradients are reduced in fp32", unless=lambda value: value == "float32"),
    "training.dtype": refuses("weights are kept in fp32", unless=lambda value: value == "float32"),
    "training.enable-cpu-offload": refuses("offloading is not modelled for torchtitan", unless=lambda value: not truth(value)),
    **named("training.compile compile.enable", Setting(_compile)),
    "compile.components": Setting(_components),
    **named("parallelism.data-parallel-replicate-degree training.data-parallel-replicate-degree", _degree("replicate")),
    **named("parallelism.data-parallel-shard-degree training.data-parallel-shard-degree", _degree("shard")),
    **named("parallelism.tensor-parallel-degree training.tensor-parallel-degree", sets("tp")),
    **named("parallelism.pipeline-parallel-degree experimental.pipeline-parallel-degree", sets("pp")),
    **named("parallelism.context-parallel-degree experimental.context-parallel-degree", sets("cp")),
    "parallelism.expert-parallel-degree": sets("ep"),
    "parallelism.expert-tensor-parallel-degree": states("expert_tp"),
    "parallelism.pipeline-parallel-microbatch-size": states("stage_batch"),
    **named("parallelism.pipeline-parallel-schedule experimental.pipeline-parallel-schedule",
            sets("schedule", one_of(_SCHEDULES, "not a schedule known here"))),
    "parallelism.fsdp-reshard-after-forward": Setting(_reshard),
    "parallelism.enable-async-tensor-parallel": refuses("overlap of tensor parallelism is not modelled",
                                                        unless=lambda value: not truth(value)),
    "parallelism.disable-loss-parallel": refuses("the loss is divided over tp", unless=lambda value: not truth(value)),
    "activation-checkpoint.mode": Setting(_recompute),
    "activation-checkpoint.selective-ac-option": Setting(_every),
    **named("float8.recipe-name quantize.dense.float8.recipe-name quantize.linear.float8.recipe-name",
            sets("float8", one_of({"tensorwise": "tensorwise", "rowwise": "rowwise"}, "tensorwise and rowwise are modelled"))),
    **named("float8.enable-fsdp-float8-all-gather quantize.dense.float8.enable-fsdp-float8-all-gather "
            "quantize.linear.float8.enable-fsdp-float8-all-gather", Setting(_all_gather)),
    **ignores(
        "job.dump-folder job.description job.print-args job.print-config job.custom-config-module profiling.enable-profiling "
        "profiling.save-traces-folder profiling.profile-freq profiling.enable-memory-snapshot profiling.save-memory-snapshot-folder "
        "metrics.log-freq metrics.enable-tensorboard metrics.save-tb-folder metrics.disable-color-printing metrics.enable-wandb "
        "optimizer.lr optimizer.eps lr-scheduler.warmup-steps lr-scheduler.decay-ratio lr-scheduler.decay-type "
        "lr-scheduler.min-lr-factor lr-scheduler.lr-min training.max-norm training.steps training.dataset training.dataset-path "
        "checkpoint.enable-checkpoint checkpoint.enable checkpoint.folder checkpoint.interval checkpoint.model-weights-only "
        "checkpoint.last-save-model-only checkpoint.last-save-model-weights-only checkpoint.export-dtype checkpoint.async-mode "
        "checkpoint.initial-load-in-hf checkpoint.initial-load-dequantize checkpoint.initial-load-path compile.backend "
        "float8.precompute-float8-dynamic-scale-for-fsdp quantize.dense.float8.precompute-float8-dynamic-scale-for-fsdp "
        "quantize.linear.float8.precompute-float8-dynamic-scale-for-fsdp quantize.linear.float8.force-recompute-fp8-weight-in-bwd "
        "float8.filter-fqns float8.moe-fqns quantize.dense.float8.filter-fqns quantize.linear.float8.filter-fqns "
        "quantize.moe.float8.fqns quantize.grouped-mm.float8.fqns float8.force-recompute-fp8-weight-in-bwd validation.enabled "
        "validation.enable validation.dataset validation.freq validation.steps validation.local-batch-size validation.seq-len "
        "comm.train-timeout-seconds "
        "model.print-after-conversion model.tokenizer-path profiling.profiler-active training.seed training.deterministic "
        "lr-scheduler.decay-style fault-tolerance.enable"
    ),
    "job.config-file": Setting(lambda draft, value: take_file(draft, value, SETTINGS)),
}  # fmt: skip


def finish(draft: Draft) -> None:
    """The model by its flavor, and the ranks: shards fill what the other degrees leave."""
    plan, facts = draft.plan, draft.facts
    plan |= {"implementation": "torchtitan", "recipe": "fsdp-bf16", "zero": 3}
    name, flavor = str(facts.get("name", "")), str(facts.get("flavor", ""))
    if (name, flavor) in _FLAVORS:
        draft.model = _FLAVORS[name, flavor]
    elif facts.get("assets"):
        draft.model = str(facts["assets"]).rstrip("/").removesuffix("/original/tokenizer.model")
    draft.assume("recompute", "selective", "the default of activation_checkpoint.mode")
    draft.assume("optimizer_kernel", "fused", "the default of optimizer.implementation")
    draft.assume("seq", 2048, "the default of training.seq_len")
    draft.assume("micro_batch", 8, "the default of training.local_batch_size")
    inner = plan.get("tp", 1) * plan.get("pp", 1)
    outer = plan.get("cp", 1)
    replicas = draft.whole("replicate")
    if "shard" not in facts:
        given = draft.whole("gpus", draft.whole("nodes") * draft.whole("gpus_per_node"))
        stated = bool({"gpus", "gpus_per_node"} & set(facts))
        gpus = given if stated else max(8, 2 * inner * outer * replicas)
        if not stated:
            draft.assumed.append(
                f"GPUs {gpus}: data_parallel_shard_degree fills those there are, which the text does not say; --gpus does"
            )
        facts["shard"] = max(1, gpus // (inner * outer * replicas))
    plan["dp"] = replicas * draft.whole("shard")
    if replicas > 1:
        plan["dp_replicate"] = replicas
    _stages(draft)
    _whole_experts(draft)
    _options(draft)


def _stages(draft: Draft) -> None:
    """A pipeline cuts the local batch into micro-batches, of one sequence unless the text says more."""
    plan = draft.plan
    if plan.get("pp", 1) == 1:
        plan.pop("schedule", None)
        return
    local = plan["micro_batch"]
    plan["micro_batch"] = draft.whole("stage_batch")
    plan.setdefault("global_batch", local * plan["dp"])
    if plan.get("schedule", "1f1b") in ("interleaved", "interleaved-zb", "looped-bfs", "zb-v", "dualpipe-v"):
        plan["virtual_stages"] = 2  # the default of schedules with several stages a rank


def _whole_experts(draft: Draft) -> None:
    """Expert parallelism takes over the tensor-parallel ranks, unless these divide each expert (expert_tensor_parallel_degree = tp)."""
    plan, tp = draft.plan, draft.plan.get("tp", 1)
    ep, divided = plan.get("ep", 1), draft.whole("expert_tp")
    if ep > 1 and tp > 1 and divided != tp:
        if ep % tp or divided != 1:
            raise InputError.of(
                "ep",
                ep,
                f"experts over tensor-parallel ranks are modelled for a multiple of tp ({tp}), each of them whole",
            )
        plan |= {"ep": ep // tp, "ep_over_tp": True}


def _options(draft: Draft) -> None:
    """torch.compile, layers' own recomputation and float8, each of several settings."""
    plan, facts = draft.plan, draft.facts
    if facts.get("compile"):
        plan["compile"] = tuple(facts.get("components", ("model", "loss")))
        if "components" not in facts:
            draft.assumed.append(
                "compile model,loss: the default of compile.components (before April 2025 the model alone)"
            )
    if facts.get("every") and plan["recompute"] == "selective":
        plan |= {"recompute": "full", "recompute_every": facts["every"]}
    if "float8" not in plan or plan["float8"] == "rowwise":
        plan.pop("float8_all_gather", None)


def _pipeline(writing: Writing) -> dict[str, object]:
    """The schedule and the size of its micro-batches. Two stages a rank are the default where a schedule has several."""
    plan, names = writing.plan, {name: title for title, name in _SCHEDULES.items()}
    if plan.virtual_stages == (1 if plan.schedule in ("1f1b", "gpipe") else 2):
        writing.say("virtual_stages", None)
    return {
        "pipeline_parallel_schedule": names[writing.say("schedule", "1f1b")],
        "pipeline_parallel_microbatch_size": plan.micro_batch,
    }


def write(writing: Writing) -> str:
    """The TOML of a plan that torchtitan trains."""
    plan = writing.plan
    writing.only("implementation", "torchtitan")
    for name in (
        "recipe zero seq micro_batch dp dp_replicate tp pp cp ep ep_over_tp recompute recompute_every optimizer reshard_after_forward "
        "compile float8 float8_all_gather"
    ).split():
        writing.say(name, None)
    model = next((pair for pair, known in _FLAVORS.items() if known == writing.model), None)
    if model is None:
        writing.notes.append(f"MODEL {writing.model}: torchtitan has no such flavor; state model.name and model.flavor")
    kernel = {"loop": "for-loop"}.get(writing.say("optimizer_kernel", "foreach"), plan.optimizer_kernel)
    stages = plan.pp > 1
    local = plan.micro_batch * (plan.microbatches if stages else 1)
    training: dict[str, object] = {"seq_len": plan.seq, "local_batch_size": local}
    if writing.say("global_batch", None) is not None and not stages:
        training["global_batch_size"] = plan.global_batch
    sections: dict[str, dict[str, object]] = {
        "model": {"name": model[0], "flavor": model[1]} if model else {"hf_assets_path": writing.hub_id},
        "optimizer": {
            "name": {"adamw": "AdamW", "muon": "Muon"}.get(plan.optimizer, plan.optimizer),
            "implementation": kernel,
        },
        "training": training,
        "parallelism": {
            "data_parallel_replicate_degree": plan.dp_replicate,
            "data_parallel_shard_degree": plan.dp // plan.dp_replicate,
            "fsdp_reshard_after_forward": "default" if plan.reshard_after_forward else "never",
            "tensor_parallel_degree": plan.tp,
            "pipeline_parallel_degree": plan.pp,
            "context_parallel_degree": plan.cp,
            "expert_parallel_degree": plan.expert_ranks,
        }
        | ({"expert_tensor_parallel_degree": plan.tp} if plan.ep > 1 < plan.tp and not plan.ep_over_tp else {})
        | (_pipeline(writing) if stages else {}),
        "activation_checkpoint": {"mode": plan.recompute}
        | ({"selective_ac_option": "op"} if plan.recompute == "selective" else {}),
    }
    if plan.recompute_every > 1:
        sections["activation_checkpoint"] = {"mode": "selective", "selective_ac_option": str(plan.recompute_every)}
    if plan.compile:
        sections["compile"] = {"enable": True, "components": list(plan.compile)}
    if plan.float8 != "none":
        sections["model"]["converters"] = ["quantize.linear.float8"]
        settings: dict[str, object] = {"recipe_name": plan.float8}
        if plan.float8_all_gather:
            settings = {"enable_fsdp_float8_all_gather": True}
        sections["quantize.linear.float8"] = settings
    note_rest(writing)
    lines = []
    for name, values in sections.items():
        lines += [f"[{name}]", *(f"{key} = {json.dumps(value)}" for key, value in values.items()), ""]
    return "\n".join(lines).rstrip()
