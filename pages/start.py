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
NOTES = {pipeline: "An example of stages and times, not this model's: set your own on the page."}


def render() -> None:
    overview(
        "Pick a model and a GPU in the sidebar, and the layout in its options. The pages behind the cards ask for everything else.",
        GROUPS,
        PAGES,
        NOTES,
    )


if __name__ == "__main__":
    from app import main

    main()
