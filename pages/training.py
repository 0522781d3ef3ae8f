"""Whether a training step fits: memory by device, by part, by phase."""

from calc.training import TrainingAnswer, TrainingPlan, suggest
from pages.ui import charts, suggestion_views, trace_check
from pages.ui.page import Question, show
from pages.ui.views import Metric, Numbers, Verdict, held_by_stage

TITLE, ICON = "Training memory", ":material/memory:"
PLANS = (TrainingPlan,)


def verdict(answer: TrainingAnswer, numbers: Numbers) -> Verdict:
    needs, has = numbers.show(answer.driver_bytes), numbers.show(answer.gpu_memory_bytes)
    beyond = answer.spec.beyond_positions("sequence", answer.plan.seq)
    said = [f"needs {needs} of {has} per GPU", numbers.room(answer.headroom_bytes), *beyond]
    most = numbers.show(answer.driver_upper_bytes)
    doubt = "" if answer.fits_at_most else f"but not with the highest overheads that were reported ({most})"
    return Verdict(answer.fits, "Training", "; ".join(filter(None, said)), doubt)


def headline(answer: TrainingAnswer, numbers: Numbers) -> list[Metric]:
    return [
        Metric(
            "Needed per GPU",
            numbers.show(answer.driver_bytes),
            "Peak allocated with CUDA and framework overhead: GPU memory as nvidia-smi shows it. With the highest overheads that were "
            f"reported: {numbers.show(answer.driver_upper_bytes)}",
        ),
        Metric(
            "Peak of the tensors",
            numbers.show(answer.peak_bytes),
            f"{answer.peak_bytes:,} bytes allocated, in the {answer.peak_phase}",
        ),
        Metric("Parameters", numbers.show(answer.parameters_bytes), "The shard of one device"),
        Metric("Gradients", numbers.show(answer.gradients_bytes), "The shard of one device, at the end of backward"),
        Metric("Optimizer", numbers.show(answer.optimizer_bytes), "The shard of one device, master weights included"),
        Metric("Activations", numbers.show(answer.activations_bytes), "What forward keeps for backward, at its end"),
        Metric(
            "CUDA and framework overhead",
            numbers.show(sum(answer.overhead)),
            "CUDA context, NCCL, workspace, fragmentation",
        ),
        Metric(
            "Host and NVMe",
            numbers.show(answer.offloaded.held.total),
            "What one GPU's rank keeps in host memory, or on NVMe, with offload",
        ),
        Metric("GPUs", f"{answer.plan.gpus:,}", "dp · tp · pp · cp"),
    ]


def _charts(answer: TrainingAnswer, numbers: Numbers, key: str) -> None:
    found = suggest(answer)
    suggestion_views.changes(found, numbers, key)
    memory = answer.gpu_memory_bytes
    limit = ("the GPU's memory", float(memory)) if memory else None
    charts.title("One GPU of each stage, at the highest point of the step")
    charts.stacked(held_by_stage(answer), "bytes", numbers, f"{key}stages", limit)
    charts.title("Highest point of each phase on the stage that needs most: the tensors alone")
    charts.stacked(
        {phase: [("tensors", value)] for phase, value in answer.phases.items()}, "bytes", numbers, f"{key}phases", limit
    )
    suggestion_views.limits(found, numbers, key)


QUESTION = Question(
    command="train",
    intro="Memory of one training step on each device: states, activations, and CUDA and framework overhead.",
    groups={
        "": ("seq", "micro_batch", "dp", "zero"),
        "Precision and optimizer": ("recipe", "optimizer", "optimizer_kernel"),
        "Layout": ("tp", "sequence_parallel", "pp", "schedule", "virtual_stages", "cp", "ep"),
        "Batch and shards": ("global_batch", "dp_replicate", "reshard_after_forward"),
        "Activations": ("recompute", "implementation", "attention", "loss", "dropout"),
        "Method": ("method", "lora_rank", "lora_targets", "offload", "nvme", "nvme_GBps"),
        "Objective": ("objective", "prompt_tokens", "reference"),
        "CUDA and framework overhead": ("context_mib", "nccl_mib", "workspace_mib", "fragmentation_percent"),
    },
    headline=headline,
    charts=_charts,
    verdict=verdict,
    after_table=trace_check.check,
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
