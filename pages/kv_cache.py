"""How many users a GPU serves, how fast, and what its memory holds."""

from calc.commands import COMMANDS
from pages.ui import parts
from pages.ui.answers import serving
from pages.ui.page import Question, show

TITLE, HEADING, ICON = "Serve", "Serve: how many users, how fast?", ":material/database:"
PLANS = (COMMANDS["serve"].plan,)

QUESTION = Question(
    command="serve",
    levers=serving.LEVERS,
    sliders=("context", "concurrency", "tp"),
    groups={
        "Layout": ("pp", "dp", "ep"),
        "Load": ("prompt", "output", "length_spread", "rounds", "cached_prompt", "repeated_prompts", "batching",
                 "keep_window", "keep_sinks", "images"),
        "Engine": ("engine_version", "gpu_memory_utilization", "kv_memory_gib", "block_size", "max_batched_tokens",
                   "max_seqs", "enforce_eager", "async_scheduling", "prefix_caching"),
        **{title: fields for title, _, fields in serving.ENGINE_FIELDS},
        "Engine overhead": ("overhead_gib", "activation_gib", "non_torch_gib", "cuda_graph_gib"),
        "Speed and price": ("times", "draft_tokens", "draft_acceptance", "price_per_gpu_hour",
                            "compute_efficiency", "bandwidth_efficiency"),
    },
    figures=serving.figures_of,
    picture=serving.picture,
    hidden=serving.without_effect,
    verdict=serving.verdict,
    bar=parts.of_serving,
    tabs={
        "Users and speed": serving.against_users,
        "Memory against context": serving.against_context,
        "Formats": serving.formats,
    },
)  # fmt: skip


def render() -> None:
    show(QUESTION)


if __name__ == "__main__":
    from app import main

    main()
