"""Classes of the installed transformers on the meta device, which has shapes and no memory, and what they hold."""

from __future__ import annotations

import copy
import json
import re
from collections import defaultdict
from collections.abc import Iterator
from typing import Any

# besides the causal and the image-text classes: heads on their trunks, and encoders that stand alone
HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice")
HEADS += ("ForMaskedLM", "Model")
ALONE = ("CLIPModel", "CLIPTextModel", "CLIPVisionModel", "SiglipModel", "SiglipVisionModel", "PixtralVisionModel")
ALONE += ("ViTModel", "ViTForImageClassification")
_VISION = re.compile(r"vision_|visual\.|multi_modal_projector|embed_vision|image_newline|connector\.|mm_projector")
_WRITES_TEXT = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration")


def build(class_name: str, config: dict[str, Any]) -> Any:
    """The model of that class."""
    import torch
    import transformers

    model_class = getattr(transformers, class_name)
    with torch.device("meta"):
        return model_class(model_class.config_class.from_dict(copy.deepcopy(config)))


def unique(model: Any) -> Iterator[tuple[str, Any]]:
    """Each parameter once, with its name; tied ones count once."""
    seen: set[int] = set()
    for name, parameter in model.named_parameters():
        if id(parameter) not in seen:
            seen.add(id(parameter))
            yield name, parameter


def count(model: Any) -> int:
    return sum(parameter.numel() for _, parameter in unique(model))


def counted_parts(class_name: str, config: dict[str, Any]) -> dict[str, int | None]:
    """Parameters of a model: all, those that see, the embedding's (None where no one table is the input), and the head's own."""
    model = build(class_name, config)
    try:
        table = model.get_input_embeddings().weight
    except (AttributeError, NotImplementedError):
        table = None
    head = model.get_output_embeddings()
    return {
        "total": count(model),
        "vision": sum(each.numel() for name, each in unique(model) if _VISION.search(name)),
        "embedding": None if table is None else table.numel(),
        "head": 0 if head is None else sum(each.numel() for each in head.parameters() if each is not table),
    }


def causal_classes() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES as names

    return sorted(set(names.values()))


def image_text_classes() -> list[str]:
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES as names

    return sorted({*names.values(), *ALONE})


def classes_by_config() -> dict[str, list[str]]:
    """Every class that writes text, its trunk, and the trunk's other heads; by the name of their config's class."""
    import transformers

    found: dict[str, list[str]] = defaultdict(list)
    listed = {*causal_classes(), *image_text_classes()}
    for name in dir(transformers):
        if name in listed or (name.endswith(HEADS + _WRITES_TEXT) and "PreTrainedModel" not in name):
            try:
                config_class = getattr(transformers, name).config_class
            except (AttributeError, ImportError):  # no model, or one that wants a package that is not here
                continue
            found[config_class.__name__].append(name)
    return {
        config: sorted(names)
        for config, names in sorted(found.items())
        if listed.intersection(names) or any(name.endswith(_WRITES_TEXT) for name in names)
    }


def default_counts(names: list[str]) -> dict[str, Any]:
    """The default config of classes that share one, and the parameters of each; None where its own code raises."""
    import transformers

    try:
        config = json.loads(json.dumps(getattr(transformers, names[0]).config_class().to_dict()))
    except Exception:  # whatever a class's own code raises: it has no default
        return {"config": None, "parameters": dict.fromkeys(names)}
    return {"config": config, "parameters": {name: _default_count(name, config) for name in names}}


def _default_count(name: str, config: dict[str, Any]) -> int | None:
    try:
        return count(build(name, config | {"architectures": [name]}))
    except Exception:  # whatever its own code raises: nothing to compare with
        return None
