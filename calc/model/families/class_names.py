"""Which family reads a class: by its name, its spelling in other years, its trunk with another head, or the text model that it wraps."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, Final

from calc.errors import InputError
from calc.model.families import FAMILIES
from calc.model.families.base import Family
from calc.model.families.spellings import AROUND, BACKENDS, DRAFTS, MINICPM_V, REFUSED, SPELLINGS, TEXT_TYPES
from calc.model.families.task_heads import HEADS, refused
from calc.model.fields import Fields
from calc.model.spec import ModelSpec

TRUNKS: Final = ("ForCausalLM", "LMHeadModel", "ForMaskedLM", "ForConditionalGeneration", "Model")
CAUSAL: Final = ("ForCausalLM", "LMHeadModel")  # what a model_type stands for when a config names no class

_SECTIONS: Final = (
    "text_config",
    "llm_config",
    "language_config",
    "language_model_config",
    "thinker_config",
    "decoder_config",
)
_TOWERS: Final = (
    "vision_config",
    "audio_config",
    "vision_tower",
    "mm_vision_tower",
    "visual",
    "vit_config",
    "speech_config",
)


@dataclass(frozen=True, slots=True)
class Reading:
    """How a config is read: the class's name as it is shown, the family, and the class whose defaults stand in. `data` is the
    config, or the section of it that is read; `assumptions` and `notes` say what was chosen."""

    name: str
    known: str
    family: Family
    data: Mapping[str, Any]
    assumptions: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    own_head: bool = False  # the trunk of `known` under the head that `name` has
    section: str = (
        ""  # the section that is read, where its model_type is that of `known`: its class's defaults stand in
    )

    @property
    def architecture(self) -> str:
        """The class that is counted."""
        return self.name if self.own_head else self.known


def folded(name: str) -> str:
    """A name without the letters that years and programs write in other ways."""
    return name.replace("_", "").replace("-", "").casefold()


@lru_cache(maxsize=1)
def _folded_names() -> Mapping[str, str]:
    return {folded(name): name for name in FAMILIES}


def class_of_type(model_type: Any) -> str:
    """The causal class that a model_type stands for; "" where it is none."""
    if not isinstance(model_type, str) or not model_type or len(model_type) > 100:
        return ""
    if model_type in TEXT_TYPES:
        return TEXT_TYPES[model_type]
    plain = model_type.removesuffix("_text")
    for wanted in (model_type, plain):
        found = [name for name, family in FAMILIES.items() if name.endswith(CAUSAL) and family.module == wanted]
        if found:
            return found[0]
    return next((known for end in CAUSAL if (known := _same(folded(plain) + end.casefold()))), "")


def _same(name: str) -> str:
    """The class that a folded name is another name of; "" where it is none."""
    known = SPELLINGS.get(name) or _folded_names().get(name, "")
    plain = next((name.removeprefix(start) for start in BACKENDS if name.startswith(start)), "")
    return known or _folded_names().get(plain, "")


def reading(config: Mapping[str, Any]) -> Reading:
    """The family of a config. InputError where neither its class, nor its trunk, nor its text model is understood."""
    name = _class_of(config)
    if name in ("XLMRobertaModel", "XLMRobertaLoRA") and config.get("position_embedding_type") == "rotary":
        name = "JinaEmbeddingsV3Model"  # whose checkpoint bears its parent's name
    if folded(name) == "nanbeigeforcausallm" and config.get("num_loops") not in (None, 1):
        raise InputError.of(
            "num_loops", config["num_loops"], "only 1 is understood: it passes its layers several times a token"
        )
    if name in FAMILIES:
        return Reading(name, name, FAMILIES[name], config, notes=_left_out(name, config))
    own = folded(name)
    known = _same(own)
    if known:
        told = f"architectures = {known} ({name} is another name of it)"
        change = HEADS["Model"] if own.endswith("model") and not known.endswith("Model") else None
        family = _headed(FAMILIES[known], change, own) if change else FAMILIES[known]
        return Reading(name, known, family, config, (told,), own_head=change is not None)
    return _with_head(name, config) or _wrapped(name, config) or _by_type(name, config)


def _left_out(name: str, config: Mapping[str, Any]) -> tuple[str, ...]:
    """The remark that an encoder in the config of a text class (Qwen-VL's `visual`) is not counted."""
    left = [key for key in ("visual", "vision_config", "audio_config") if isinstance(config.get(key), dict)]
    if (
        not left
        or not name.endswith((*CAUSAL, "ChatGLMModel"))
        or any(isinstance(config.get(key), dict) for key in _SECTIONS)
    ):
        return ()
    return (f"counted is the text model alone, and {', '.join(left)} not",)


def _class_of(config: Mapping[str, Any]) -> str:
    """The class that `architectures` names; without one, that of the `model_type`. InputError when there is neither."""
    found = config.get("architectures")
    if not found and found != "":
        name = class_of_type(config.get("model_type"))
        found = [name] if name else found
    if isinstance(found, str):
        found = [found]
    if not isinstance(found, list) or not found or not isinstance(found[0], str) or not 0 < len(found[0]) <= 100:
        if any(isinstance(config.get(section), dict) for section in _SECTIONS):
            return str(config.get("model_type") or "a wrapper")[:100]
        raise InputError.of("architectures", found, 'it must name the model class, such as ["LlamaForCausalLM"]')
    return found[0]


def _headed(family: Family, change: Callable[[ModelSpec, Fields, str], ModelSpec], base: str) -> Family:
    return replace(family, read=lambda fields: change(family.read(fields), fields, base))


def _with_head(name: str, config: Mapping[str, Any]) -> Reading | None:
    """A known trunk with another head, or none."""
    for suffix, change in HEADS.items():
        if not folded(name).endswith(folded(suffix)):
            continue
        base = folded(name)[: -len(suffix)].removesuffix("bidirectional")
        ends = ("ForConditionalGeneration", *TRUNKS) if isinstance(config.get("text_config"), dict) else TRUNKS
        known = next((found for end in ends if (found := _same(base + end.casefold()))), "")
        if not known or refused(suffix, base):
            continue
        told = f"architectures: {name} is counted as the trunk of {known} with the head of its own class"
        return Reading(name, known, _headed(FAMILIES[known], change, base), config, (told,), own_head=True)
    return None


def _wrapped(name: str, config: Mapping[str, Any]) -> Reading | None:
    """The text model that an unknown class wraps, with a note that says what is left out."""
    around = AROUND.get(folded(name))
    if folded(name) == "minicpmv":
        around = (_minicpm_v(config), "the vision encoder and its resampler")
    if around:
        return _text_reading(name, around[0], config, around[1])
    for section in _SECTIONS:
        inner = config.get(section)
        if not isinstance(inner, dict):
            continue
        nested = inner.get("text_config")
        if isinstance(nested, dict):
            inner = nested
        known = _text_class(inner)
        if known:
            left = [
                key for key in (*_TOWERS, *(config.get(section) or {})) if key in _TOWERS and _has(config, section, key)
            ]
            what = ", ".join(dict.fromkeys(left)) or "its encoders and projectors"
            found = _text_reading(name, known, _text_data(config, inner, section), what)
            return replace(found, section=section if inner.get("model_type") == FAMILIES[known].module else "")
    return None


def _minicpm_v(config: Mapping[str, Any]) -> str:
    """The text model of a MiniCPM-V: of its version, or MiniCPM 1 where its own fields are there (2.0 states no version)."""
    version = config.get("version")
    if version is None and "scale_emb" in config:
        return "MiniCPMForCausalLM"
    if str(version) not in MINICPM_V:
        raise InputError.of(
            "version", version, f"MiniCPM-V's text model follows from it; known are {', '.join(MINICPM_V)}"
        )
    return MINICPM_V[str(version)]


def _has(config: Mapping[str, Any], section: str, key: str) -> bool:
    return config.get(key) is not None or config[section].get(key) is not None


def _text_class(inner: Mapping[str, Any]) -> str:
    """The class of a text section: by its own `architectures`, else by its model_type."""
    named = inner.get("architectures")
    if isinstance(named, list) and named and isinstance(named[0], str):
        found = named[0] if named[0] in FAMILIES else _same(folded(named[0]))
        if found:
            return found
    return class_of_type(inner.get("model_type"))


def _text_data(config: Mapping[str, Any], inner: Mapping[str, Any], section: str) -> dict[str, Any]:
    """The section, with what the wrapper says of its text at the top. Wrappers of transformers, whose section is `text_config`, tie the
    head by their own field; those of checkpoints' code leave it to the text model."""
    outer = {
        key: config[key] for key in ("torch_dtype", "dtype", "quantization_config", "quantization") if config.get(key)
    }
    tied = config.get("tie_word_embeddings")
    return {
        **outer,
        **inner,
        **({"tie_word_embeddings": tied} if section == "text_config" and tied is not None else {}),
    }


def _text_reading(name: str, known: str, data: Mapping[str, Any], left: str) -> Reading:
    note = f"{name} is not understood: counted is its text model ({known}) alone, and {left} not"
    return Reading(name, known, FAMILIES[known], data, notes=(note,))


def _is_refused(name: str) -> bool:
    """Whether the name is a head whose trunk is another than its sibling's, or a draft model's head (EAGLE, Medusa, MTP)."""
    own = folded(name)
    ends = [end for end in HEADS if own.endswith(folded(end))]
    return any(refused(end, own[: -len(end)]) for end in ends) or any(sign in own for sign in DRAFTS)


def _by_type(name: str, config: Mapping[str, Any]) -> Reading:
    """The causal class of the model_type, for a class of another name whose ending is no known head."""
    known = class_of_type(config.get("model_type"))
    why = REFUSED.get(folded(name), "")
    if why:
        raise InputError(f"architectures: {name!r} is not covered: {why}", "architectures")
    if not known or _is_refused(name) or (name.endswith(tuple(HEADS)) and not name.endswith(CAUSAL)):
        raise InputError(
            f"architectures: {name!r} is not understood (python -m calc models lists what is); "
            "python -m measure trace counts any class that the installed transformers knows",
            "architectures",
        )
    told = (
        f"architectures = {known} ({name} is not understood; it is what model_type {config['model_type']!r} stands for)"
    )
    note = f"{name} is not understood: counted is {known}, and a head or an encoder of its own is not"
    return Reading(name, known, FAMILIES[known], config, (told,), () if name.endswith(CAUSAL) else (note,))


def fallback(config: Mapping[str, Any], tried: Reading, error: InputError) -> Reading:
    """The text model of a wrapper whose own class could not be read. The error again where it wraps none."""
    found = None if tried.notes or tried.own_head or tried.name in FAMILIES else _wrapped(tried.name, config)
    if found is None:
        raise error
    return replace(found, notes=(*found.notes, f"{tried.known} reads such a config otherwise: {error}"))
