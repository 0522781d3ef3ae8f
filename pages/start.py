"""Does it fit? The chosen model on the chosen GPU, at a glance."""

from pages import compute, kv_cache, parameters, pipeline, training
from pages.ui.page import overview

TITLE, ICON = "Does it fit?", ":material/straighten:"
PAGES = (training, kv_cache, parameters, compute, pipeline)
PLANS = tuple(plan for page in PAGES for plan in page.PLANS)
GROUPS = {
    "": ("seq", "micro_batch", "context", "tokens"),
    "Training": ("recipe", "optimizer", "zero", "dp", "tp", "pp", "recompute"),
    "Serving": ("concurrency", "weights", "kv_dtype"),
    "Compute": ("gpus", "mfu"),
}


def render() -> None:
    overview(
        "Pick a model and a GPU in the sidebar. What is not asked here stays at its default; each page asks for all of it.",
        GROUPS,
        PAGES,
    )


if __name__ == "__main__":
    from app import main

    main()
