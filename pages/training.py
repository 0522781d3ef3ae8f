"""What one training step holds, whether it fits, and what to change."""

from calc.commands import COMMANDS
from calc.training.deepspeed.stage import SETTINGS
from pages.ui import parts
from pages.ui.answers import suggestions, trace_check, training
from pages.ui.page import Question, show
from pages.ui.scenario import SPREAD

TITLE, HEADING, ICON = "Train", "Train: what does one step hold?", ":material/memory:"
PLANS = (COMMANDS["train"].plan,)

QUESTION = Question(
    command="train",
    levers=training.LEVERS,
    sliders=("seq", "micro_batch", *SPREAD),
    groups={
        "Batch and shards": ("global_batch", "reshard_after_forward", "root_group"),
        "Optimizer": (
            "optimizer",
            "optimizer_kernel",
            "optimizer_in_backward",
            "offload",
            "offload_activations",
            "nvme",
            "nvme_GBps",
        ),
        "Adapters": (
            "lora_rank",
            "lora_targets",
            "lora_dropout",
            "adapter_format",
            "modules_to_save",
            "quantization",
            "bitsandbytes",
        ),
        "DeepSpeed": SETTINGS,
        "Pipeline, sequence and experts": ("schedule", "virtual_stages", "sequence_parallel", "ep"),
        "Attention and loss": ("attention", "loss", "loss_format", "keep_logits", "dropout"),
        "Objective": ("objective", "prompt_tokens", "reference"),
        "CUDA and framework overhead": ("context_mib", "nccl_mib", "workspace_mib", "fragmentation_percent"),
    },
    figures=training.figures_of,
    picture=training.picture,
    verdict=training.verdict,
    bar=parts.of_worst_stage,
    spread=True,
    tabs={
        "What to change": suggestions.changes,
        "Memory against": training.against,
        "Through the step": training.through_the_step,
        "Limits": suggestions.limits,
        "Trace": trace_check.check,
    },
)


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
