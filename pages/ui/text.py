"""Text that may come from anywhere, shown as it is."""

_MARKS = set("\\`*_{}[]()#+-.!|<>$~:&")


def plain(text: str) -> str:
    """Markdown that shows the text as it is."""
    return "".join(f"\\{letter}" if letter in _MARKS else letter for letter in text)
