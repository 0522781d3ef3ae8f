"""Which model, plan and GPU a row of published throughput stands for, by its source.

A row's plan follows from what its source says of model, GPUs, number formats, sharding, recomputation and program; it is decided
before its prediction is looked at. Rows that leave an important setting open are reported apart, with the reason.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

from calc.hardware import Gpu, gpu
from calc.model.feed_forward import MoE
from calc.model.spec import ModelSpec
from calc.step_time import TimeAnswer, TimePlan, step_time
from tests.published.throughput_models import NAMES, OTHERS, model, named_gpu, named_model


@dataclass(frozen=True)
class Case:
    """What a row asks: the model, the plan and the GPU, or why it is not predicted."""

    row: dict[str, Any]
    spec: ModelSpec | None = None
    plan: TimePlan | None = None
    gpu: Gpu | None = None
    apart: str = ""  # why the row does not count: an important setting is not stated
    skipped: str = ""  # why there is no prediction at all

    @property
    def measured(self) -> float | None:
        """Tokens a second on one GPU."""
        given = self.row["measured"]
        for key in ("tokens_per_s_per_gpu", "tokens_per_s_per_gpu_vanilla_tp"):
            if key in given:
                return float(given[key])
        if "step_time_ms" in given and self.plan:
            return self.plan.tokens_of_step / (given["step_time_ms"] / 1e3) / self.plan.gpus
        return None

    @property
    def experts(self) -> bool:
        return bool(self.spec) and any(isinstance(kind.feed_forward, MoE) for kind in self.spec.layers.kinds)

    def answer(self) -> TimeAnswer:
        assert self.spec
        assert self.plan
        return step_time(self.spec, self.plan, self.gpu)

    def error(self) -> float:
        """Predicted over measured tokens a second, minus one."""
        assert self.measured
        return self.answer().tokens_per_s_per_gpu / self.measured - 1

    def baseline(self) -> float:
        """The same of a fixed MFU of 0.40 at the dense peak of the run's number format."""
        answer = self.answer()
        assert answer.mfu
        assert self.measured
        return answer.tokens_per_s_per_gpu * 0.40 / answer.mfu / self.measured - 1


def case_of(row: dict[str, Any]) -> Case:
    """The row's model, plan and GPU, by its source; a row that cannot be read is left out with the reason."""
    if row["model"] is None:
        return Case(row, skipped="no training step: a product, a collective or a closed form")
    reader = next((read for words, read in _READERS if any(word in row["source"] for word in words)), _other)
    try:
        return reader(row)
    except (KeyError, ValueError, TypeError) as error:
        return Case(row, skipped=f"not read: {type(error).__name__}: {str(error).splitlines()[0][:120]}")


# programs by the words of a source, and which of the plan's programs runs them
_PROGRAMS = (
    ("DeepSpeed", "deepspeed"), ("litgpt", "litgpt"), ("Liger", "liger"), ("NeMo", "fused"), ("Megatron", "fused"), ("axolotl", "hf"),
    ("LLaMA-Factory", "hf"), ("accelerate", "hf"), ("trl", "hf"), ("transformers", "hf"), ("torchtune", "torchtitan"),
)  # fmt: skip


def _other(row: dict[str, Any]) -> Case:
    """Any other program by the words of its source: what the row leaves open takes the plan's default, so it does not count."""
    c = row["config"]
    program = next((name for word, name in _PROGRAMS if word.lower() in row["source"].lower()), None)
    if program is None:
        return Case(row, skipped="the program is not one that is modelled")
    spec = named_model(row["model"])
    if spec is None:
        return Case(row, skipped=f"{row['model']} is not in the catalogue")
    tp, pp, cp, ep = (_number(c.get(key)) for key in ("tp", "pp", "cp", "ep"))
    dp = int(c["n_gpus"]) // (tp * pp * cp)
    precision = str(c.get("precision", "")).lower()
    recompute = str(c.get("recompute", "none")).lower()
    recipe = {"fused": "megatron-bf16", "torchtitan": "fsdp-bf16", "deepspeed": "mixed-16"}.get(program, "pure-bf16")
    plan = TimePlan(
        implementation=program,
        recipe=recipe,
        matmul="fp8" if "fp8" in precision else None,
        seq=int(c["seq_len"]),
        micro_batch=_number(c.get("micro_batch")),
        global_batch=_number(c.get("global_batch"), 0) or None,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep,
        zero=_number(c.get("zero"), {"fused": 1, "torchtitan": 3}.get(program, 0)) if dp * cp > 1 else 0,
        recompute="full" if recompute.startswith(("full", "true")) else "none",
        dropout="off",
    )
    return Case(row, spec, plan, named_gpu(str(c["gpu"])), "a program whose settings the source states in part")


_COMPOSER_GPUS = {"h100_80gb": "h100-sxm-80gb", "a100_80gb": "a100-sxm-80gb", "a100_40gb": "a100-sxm-40gb"}


def _llm_foundry(row: dict[str, Any]) -> Case:
    """Composer with FSDP of 2023, eager; attention: the Triton kernel of FlashAttention-1, the script's default; its own AdamW, tensor by
    tensor. Networks as the README states: 1600 Gb/s a node of A100s, 3200 of H100s."""
    c = row["config"]
    h100 = c["gpu"].startswith("h100")
    plan = TimePlan(
        implementation="hf",
        recipe="fsdp-bf16",
        matmul="fp8" if "fp8" in c["precision"] else "bf16",
        seq=c["seq_len"],
        dp=c["n_gpus"],
        zero=3,
        reshard_after_forward=c["sharding"] == "FULL_SHARD",
        micro_batch=c["micro_batch"],
        global_batch=c["global_batch"],
        recompute="full" if str(c["recompute"]) == "True" else "none",
        attention="flash",
        attention_kernel="flash-triton",
        optimizer_kernel="loop",
        reduce_format="bf16",
        dropout="off",
        inter_GBps=50.0 if h100 else 25.0,
    )
    if str(c.get("act_cpu_offload")) == "True":
        return Case(row, skipped="activations on the host are not modelled")
    return Case(row, model(row["model"], seq=c["seq_len"]), plan, gpu(_COMPOSER_GPUS[c["gpu"]]))


_DGX = {
    "DGX-GB300": "gb300-288gb", "DGX-GB200": "gb200-186gb", "DGX-B300": "b300-288gb", "DGX-B200": "b200-180gb", "DGX-H100": "h100-sxm-80gb",
    "H100": "h100-sxm-80gb", "B200": "b200-180gb",
}  # fmt: skip
_PRECISION = {
    "BF16": "bf16",
    "FP8": "fp8",
    "FP8-CS": "fp8",
    "FP8-DS": "fp8",
    "MXFP8": "mxfp8",
    "FP8-MX": "mxfp8",
    "NVFP4": "nvfp4",
}


# what Megatron-Bridge's recipes compute again (perf_recipes at 067f987d), by model and system
_AGAIN = {
    ("DeepSeekV3", "DGX-H100"): ("mla_up_proj", "mlp"),
    **{("DeepSeekV3", f"DGX-{name}"): ("mla_up_proj",) for name in ("B200", "B300", "GB200", "GB300")},
    ("Kimi_K2", "DGX-H100"): ("mla_up_proj", "mlp"),
    **{("Kimi_K2", f"DGX-{name}"): ("mla_up_proj",) for name in ("B200", "GB200", "GB300")},
    **{("GPT OSS 120B", f"DGX-{name}"): ("layernorm", "moe_act") for name in ("B200", "GB200", "H100")},
    ("Nemotron_3_Nano", "DGX-H100"): ("layernorm",),
    ("Nemotron_3_Super", "DGX-B200"): ("moe_act", "layernorm"),
}
# how they exchange experts' tokens and what their CUDA graphs hold (the same), where it is not fused dispatch and graphs of all but the
# experts. The recipes with graphs of the whole step overlap the exchange too, but pad experts' rows and copy them to a stash, which no
# plan expresses: both are left out.
_EXCHANGE: dict[tuple[str, str], dict[str, Any]] = {
    ("Qwen3_235B_a22B", "DGX-H100"): {"ep_dispatch": "all-to-all", "ep_overlap": True, "cuda_graphs": "none"},
    ("Qwen3_235B_a22B", "DGX-B200"): {"ep_dispatch": "all-to-all", "cuda_graphs": "none"},
    ("DeepSeekV3", "DGX-H100"): {"cuda_graphs": "none", "dp_overlap": False},
    ("Kimi_K2", "DGX-H100"): {"cuda_graphs": "none"},
    ("Kimi_K2", "DGX-B200"): {"cuda_graphs": "none"},
    ("Kimi_K2", "DGX-GB300"): {"cuda_graphs": "none"},
    ("GPT OSS 120B", "DGX-H100"): {"cuda_graphs": "none"},
    ("GPT OSS 120B", "DGX-B200"): {"cuda_graphs": "none"},
    ("GPT OSS 120B", "DGX-GB200"): {"cuda_graphs": "none", "ep_overlap": True},
    ("Nemotron_3_Super", "DGX-B200"): {"cuda_graphs": "none"},
}


# recipes whose CUDA graphs hold the whole step, in MXFP8 from release 26.06 on
_WHOLE_STEP = {
    *((name, f"DGX-{system}") for name in ("DeepSeekV3", "GPT OSS 120B") for system in ("GB200", "GB300")),
    *((name, f"DGX-{system}") for name in ("Qwen3_30B_a3B", "Qwen3_235B_a22B") for system in ("GB200", "GB300", "B300")),
    ("Qwen3_235B_a22B", "DGX-B200"), ("DeepSeekV3", "DGX-B300"), ("DeepSeekV4 Flash", "DGX-GB300"),
}  # fmt: skip


def _mtp(name: str) -> int:
    """Layers of multi-token prediction of a recipe (recipes/deepseek), unless the row says that they are off."""
    return int(name.startswith("DeepSeekV3") and "w/o MTP" not in name)


def _exchange(name: str, system: str, graphs: str, ep: int) -> dict[str, Any]:
    """Dispatch, its overlap and CUDA graphs of a recipe with experts."""
    plan = {"ep_dispatch": "fused", "cuda_graphs": graphs}
    if graphs == "full":
        return plan
    if (name, system) == ("DeepSeekV3", "DGX-B200"):
        return plan | ({"ep_overlap": True} if ep > 8 else {"cuda_graphs": "none"})
    return plan | _EXCHANGE.get((name, system), {})


def _number(value: Any, missing: int = 1) -> int:
    return missing if value in (None, "n/a", "", "null") else int(float(value))


def _megatron(row: dict[str, Any]) -> Case:
    """Megatron Core with Transformer Engine. Megatron-Bridge's performance recipes: distributed optimizer, gradients reduced in bf16,
    tensor parallelism overlapped, experts balanced; fused dispatch (HybridEP) and partial CUDA graphs for experts, and from release
    26.06 graphs of the whole step in MXFP8 (perf_recipes/*/common.py)."""
    c = row["config"]
    tp, pp, cp, ep = (_number(c.get(key)) for key in ("tp", "pp", "cp", "ep"))
    gpus, batch, micro = int(c["n_gpus"]), int(c["global_batch"]), _number(c.get("micro_batch"))
    vpp = _number(c.get("vpp"))
    dp = gpus // (tp * pp * cp)
    name = re.sub(
        r" \(.*\)$", "", row["model"]
    )  # without "(w/o MTP)", "(dropless)", "(tokendrop)": balanced experts drop nothing
    if name not in NAMES and name not in OTHERS:
        return Case(row, skipped=f"{name} is not in the catalogue")
    spec = model(name)
    experts = any(isinstance(kind.feed_forward, MoE) for kind in spec.layers.kinds)
    precision = c["precision"].split()[0].upper()
    release = re.search(r"\[(\d\d\.\d\d)", row["source"])
    recent = bool(release) and release[1] >= "26.06"
    graphs = "none"
    if experts:
        whole = recent and precision in ("MXFP8", "FP8-MX") and (name, c["gpu"]) in _WHOLE_STEP
        graphs = "full" if whole else "attention"
    over_tp = experts and tp > 1 and ep % tp == 0  # the recipes' expert tensor parallelism is 1
    sharded = str(c.get("fsdp")) in ("1", "1.0")
    plan = TimePlan(
        implementation="fused",
        recipe="megatron-bf16",
        matmul=_PRECISION.get(precision, "fp8"),
        seq=int(c["seq_len"]),
        micro_batch=micro,
        global_batch=batch,
        dp=dp,
        tp=tp,
        pp=pp,
        cp=cp,
        ep=ep // tp if over_tp else ep,
        ep_over_tp=over_tp,
        zero=3 if sharded else 1,
        schedule="interleaved" if vpp > 1 else "1f1b",
        virtual_stages=vpp if pp > 1 else 1,
        optimizer_kernel="fused",
        reduce_format="bf16",
        mtp_layers=_mtp(row["model"]),
        **(_exchange(name, c["gpu"], graphs, ep) if experts else {"cuda_graphs": graphs}),
        expert_kernels="fused" if graphs == "full" else None,
        recompute_modules=() if graphs == "full" and name == "GPT OSS 120B" else _AGAIN.get((name, c["gpu"]), ()),
        dropout="off",
    )
    return Case(row, spec, plan, gpu(_DGX[c["gpu"]]))


def _titan_gpu(text: str) -> Gpu:
    if "A100" in text:
        return gpu("a100-sxm-80gb")
    if "H200" in text:
        return gpu("h200-141gb")
    if "B200" in text:
        return gpu("b200-180gb")
    if "HBM2e" in text or "95GiB" in text:  # the part of 500 W, whose 94.99 GiB torchtitan logs
        return gpu("h100-sxm-96gb")
    return gpu("h100-sxm-80gb")


def _compiled(source: str) -> tuple[str, ...]:
    """What torchtitan compiles: its layers, and since spring 2025 the loss too (before, "compiling loss function causes CUDA errors")."""
    return ("model", "loss") if "_2025" in source else ("model",)


def _torchtitan(row: dict[str, Any]) -> Case:
    """torchtitan: FSDP2 with fp32 shards, gathered in bf16 and reduced in fp32, fused AdamW, SDPA's FlashAttention-2, context parallelism
    by all-gather (its default rotate method); eager unless the row says compile."""
    c = row["config"]
    name = row["model"] if row["model"] in OTHERS else re.sub(r" \(.*\)$", "", row["model"])
    spec = model(name) if name in OTHERS else named_model(name)
    if spec is None:
        return Case(row, skipped=f"{row['model']} is not in the catalogue")
    extra = f"{c.get('extra', '')} {c.get('precision', '')} {c.get('fp8', '')}"
    compiled = "compile" in extra or str(c.get("compile")).lower() == "true"
    narrow = "float8" in extra or "fp8" in extra
    tp, pp, cp, ep = (_number(c.get(key)) for key in ("tp", "pp", "cp", "ep"))
    dp = int(c["n_gpus"]) // (tp * pp * cp)
    shards = _number(c.get("fsdp"), dp)
    micro = c.get("micro_batch") or 1
    recompute = str(c.get("recompute", ""))
    local = c.get("local_batch")
    plan = {
        "implementation": "torchtitan",
        "recipe": "fsdp-bf16",
        "float8": "rowwise" if "rowwise" in extra else "tensorwise" if narrow else "none",
        "float8_all_gather": narrow and "rowwise" not in extra,
        "seq": int(c["seq_len"]),
        "micro_batch": int(micro),
        "dp": dp,
        "dp_replicate": max(1, dp // shards),
        "tp": tp,
        "cp": cp,
        "context_exchange": "all-gather",
        "ep": ep,
        "zero": 3,
        "recompute": "full"
        if recompute.startswith(("full", "selective layer"))
        else "none"
        if recompute.startswith("none")
        else "selective",
        "reshard_after_forward": "never" not in str(c.get("reshard_after_forward", "")),
        "optimizer_kernel": "fused",
        "compile": _compiled(row["source"]) if compiled or narrow else (),
        "recompute_every": 2 if "selective layer" in recompute else 1,
        "tp_overlap": "asynctp" in extra.lower(),
        "dropout": "off",
    }
    if pp > 1:
        return Case(row, skipped="torchtitan with pipeline stages is not modelled by the memory rules that time shares")
    apart = []
    if "micro_batch" not in c and not local:
        apart.append("micro-batch not stated")
    if "95GiB" in str(c["gpu"]):
        apart.append("95 GiB: which H100 is not stated; taken for the part of 500 W")
    if "SimpleFSDP" in str(c.get("impl", "")):
        apart.append("another FSDP than the one that is modelled")
    if "likely" in recompute or not recompute:
        apart.append("recomputation not stated")
    return Case(row, spec, TimePlan(**plan), _titan_gpu(str(c["gpu"])), "; ".join(apart))


def _simumax(row: dict[str, Any]) -> Case:
    """Megatron-LM with Transformer Engine 2.11 on one node of B200s; nothing is overlapped (docs/b200/b200_real_repro_guide.md: "launcher
    defaults keep overlap-related paths off")."""
    c = row["config"]
    name = row["model"].split(" dims")[0]
    spec = model(name, layers=int(c["layers"]))
    micro, count = int(c["micro_batch"]), int(c["num_microbatches"])
    plan = TimePlan(
        implementation="fused",
        recipe="megatron-bf16",
        seq=int(c["seq_len"]),
        micro_batch=micro,
        global_batch=micro * count * int(c["dp"]),
        dp=int(c["dp"]),
        tp=int(c["tp"]),
        pp=int(c["pp"]),
        cp=int(c["cp"]),
        ep=int(c["ep"]),
        zero=1,
        optimizer_kernel="fused",
        tp_overlap=False,
        dp_overlap=False,
        dropout="off",
    )
    return Case(row, spec, plan, gpu("b200-180gb"))


def _moonlight(row: dict[str, Any]) -> Case:
    """Megatron-Bridge's recompute study (recipes/moonlight): experts over all eight GPUs, which lie across the tensor-parallel pairs;
    plain all-to-all, no CUDA graphs, gradients reduced in bf16."""
    c = row["config"]
    spec = model(row["model"])
    chosen = c["recompute_modules"]
    plan = TimePlan(
        implementation="fused",
        recipe="megatron-bf16",
        seq=int(c["seq_len"]),
        micro_batch=int(c["micro_batch"]),
        global_batch=int(c["global_batch"]),
        dp=4,
        tp=2,
        ep=4,
        ep_over_tp=True,
        zero=1,
        optimizer_kernel="fused",
        reduce_format="bf16",
        recompute_modules=() if chosen == "none" else tuple(chosen.split("+")),
        tp_overlap=False,
        dropout="off",
    )
    apart = "one micro-batch a step, where the host's work dominates, of modules without a reading; routing is not balanced (its recipe)"
    return Case(row, spec, plan, gpu("h100-sxm-80gb"), apart)


_READERS = (
    (("llm-foundry",), _llm_foundry),
    (("performance-summary", "Megatron-LM@"), _megatron),
    (("torchtitan",), _torchtitan),
    (("SimuMax",), _simumax),
    (("perf-activation-recompute",), _moonlight),
)
