"""Which GPU, which way: a sentence to fill in, its answer, and the matrix of ways and GPUs around it."""

from pages.ui.answers import fit

TITLE, HEADING, ICON = "Fit", "Which GPU, which way?", ":material/straighten:"
PLANS = fit.PLANS


def render() -> None:
    fit.show()


if __name__ == "__main__":
    from app import main

    main()
