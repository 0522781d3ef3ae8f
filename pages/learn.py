"""Why the numbers are what they are: one topic at a time, as a figure to move."""

from pages.ui import learn

TITLE, HEADING, ICON = "Learn", "Learn: why these numbers?", ":material/school:"
PLANS = learn.PLANS


def render() -> None:
    learn.show()


if __name__ == "__main__":
    from app import main

    main()
