"""Parameters of transformers' classes, as recorded or counted again on the meta device."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from tests.calc.model.meta_model import classes_by_config, counted_parts, default_counts
from tests.recorded.recording import Recording

COUNTS = Recording("class_counts", ("tests.calc.model.meta_model",), ("transformers",), again=6)


def default_classes() -> Iterator[tuple[str, dict[str, Any] | None, int | None]]:
    """Each class's name, its default config and its parameters; None where transformers cannot make them."""
    for config_class, names in COUNTS.result("classes", None, classes_by_config).items():
        found = COUNTS.result(config_class, names, lambda names=names: default_counts(names))
        for name in names:
            config = found["config"]
            yield name, config and config | {"architectures": [name]}, found["parameters"][name]


def catalogue_count(name: str, class_name: str, config: dict[str, Any]) -> dict[str, int | None]:
    """`counted_parts` of a model of the catalogue, whose config names `class_name` or has its tensors."""
    inputs = [class_name, config]
    found: dict[str, int | None] = COUNTS.result(
        f"catalogue {name}", inputs, lambda: counted_parts(class_name, config), "catalogue"
    )
    return found
