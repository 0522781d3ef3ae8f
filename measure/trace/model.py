"""The user's model, built by transformers without memory: on the meta device, cut to the layers to run, with fake storages."""

from __future__ import annotations

import contextlib
import io
import logging
import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from inspect import signature
from typing import Any

import torch
import transformers
from torch import nn
from transformers import CONFIG_MAPPING, MODEL_FOR_CAUSAL_LM_MAPPING, AutoConfig

from calc.errors import InputError
from measure.trace.options import TraceOptions
from measure.trace.quantised import fill_quantised, quantise

_IGNORED = ("auto_map", "quantization_config", "dtype", "torch_dtype", "transformers_version", "_name_or_path")
_DTYPES = {"pure-bf16": torch.bfloat16, "amp": torch.float32, "fp32": torch.float32, "fsdp-bf16": torch.float32}
_TRANSFORMERS = f"transformers {transformers.__version__}"
_SAME_MODEL = {"kimi_k2": "deepseek_v3"}  # published under another name, with the same class and fields
_TALKATIVE = ("transformers", "torch._subclasses.fake_tensor")
_META = torch.device("meta")
_DROPOUTS = ("dropout", "pdrop")


@dataclass(frozen=True, slots=True)
class Stack:
    """The decoder layers: the module list's path, each layer's kind, and for each the layer that is run in its place."""

    path: str
    kinds: tuple[str, ...]
    stands_for: tuple[int, ...]

    @property
    def run(self) -> tuple[int, ...]:
        """The layers that are really run."""
        return tuple(sorted(set(self.stands_for)))


@contextlib.contextmanager
def quiet() -> Iterator[None]:
    """Keep the libraries' notes and warnings away from the user's terminal."""
    loggers = [logging.getLogger(name) for name in _TALKATIVE]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    try:
        with warnings.catch_warnings(), contextlib.redirect_stderr(io.StringIO()):
            warnings.simplefilter("ignore")
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def build(raw: Mapping[str, Any], options: TraceOptions, device: torch.device = _META) -> nn.Module:
    """The model in training mode, with adapters and recomputation as asked, on a device (without memory unless one is given).

    InputError when it cannot be built.
    """
    if not isinstance(raw.get("model_type"), str):
        raise InputError.of("model_type", raw.get("model_type"), "it must name an architecture, as config.json does")
    values = {key: value for key, value in raw.items() if key not in (*_IGNORED, "model_type")}
    name = _SAME_MODEL.get(raw["model_type"], raw["model_type"])
    if name not in CONFIG_MAPPING:
        raise InputError.of("model_type", name, f"{_TRANSFORMERS} does not know this model")
    try:
        config = AutoConfig.for_model(name, **values)
        kind = _class_of(raw, config)
    except Exception as error:
        raise InputError(f"config: {_TRANSFORMERS} cannot read it: {error}", "config") from None
    if options.dropout == "off":
        for part in (config, config.get_text_config()):
            _drop_nothing(part)
    attention = _attention(kind, options)
    try:
        with device:
            model: nn.Module = kind._from_config(config, dtype=_DTYPES[options.recipe], attn_implementation=attention)
    except Exception as error:
        raise InputError(f"config: {_TRANSFORMERS} cannot build {kind.__name__} from it: {error}", "config") from None
    _check_length(model, options.seq)
    model.train()
    if options.method == "qlora":
        quantise(model)
    if options.recompute == "full":
        _recompute(model)
    return model if options.method == "full" else _with_adapters(model, options)


def _class_of(raw: Mapping[str, Any], config: Any) -> Any:
    """The class that `architectures` names, else the causal language model of that config."""
    for name in raw.get("architectures") or ():
        found = getattr(transformers, name, None)
        if hasattr(found, "_from_config"):
            return found
    return MODEL_FOR_CAUSAL_LM_MAPPING[type(config)]


def _attention(kind: Any, options: TraceOptions) -> str:
    """The attention implementation: what was asked, or the one that transformers takes when nobody asks."""
    if options.attention == "auto":
        return "sdpa" if kind._supports_sdpa else "eager"
    if options.attention == "sdpa" and not kind._supports_sdpa:
        raise InputError.of("attention", "sdpa", f"{kind.__name__} has none in {_TRANSFORMERS}; use eager")
    return options.attention


def _check_length(model: nn.Module, seq: int) -> None:
    """InputError when the sequence is longer than a table of learned positions."""
    for name, module in model.named_modules():
        if (
            isinstance(module, nn.Embedding)
            and name.endswith(("wpe", "embed_positions"))
            and seq > module.num_embeddings
        ):
            raise InputError.of("seq", seq, f"the model has {module.num_embeddings} learned positions")


def _recompute(model: Any) -> None:
    try:
        model.activation_checkpointing_enable({"use_reentrant": False, "preserve_rng_state": False})
    except ValueError as error:
        raise InputError.of("recompute", "full", str(error)) from None


def _drop_nothing(config: Any) -> None:
    """Set every dropout probability of the config, defaults of its class included, to zero."""
    for name, value in vars(config).items():
        if isinstance(value, float) and any(part in name for part in _DROPOUTS):
            setattr(config, name, 0.0)


def _with_adapters(model: nn.Module, options: TraceOptions) -> nn.Module:
    from peft import LoraConfig, get_peft_model

    targets: Any = list(options.lora_targets) or (["all-linear"] if options.method == "qlora" else None)
    if targets == ["all-linear"]:
        targets = "all-linear"
    adapters = LoraConfig(
        r=options.lora_rank,
        target_modules=targets,
        use_dora=options.method == "dora",
        task_type="CAUSAL_LM",
        lora_dropout=0.0,
    )
    try:
        adapted = get_peft_model(model, adapters)
    except ValueError as error:
        raise InputError(f"lora_targets: peft cannot place adapters: {error}", "lora_targets") from None
    return adapted


def find_stack(model: nn.Module, layers: int | None, neighbours: bool = False) -> Stack:
    """The decoder layers and which of them are to be run: the first, the last and one of each kind between, or `layers` of them.

    `neighbours`: what happens in a layer depends on its neighbours, as with FSDP2, which gathers one while another runs.
    """
    config = text_config(model)
    lists = [
        (path, module)
        for path, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) == config.num_hidden_layers
    ]
    if not lists:
        return Stack("", (), ())
    path, stack = max(lists, key=lambda found: sum(parameter.numel() for parameter in found[1].parameters()))
    if (layers or 0) > len(stack):
        raise InputError.of("layers", layers, f"{type(model).__name__} has {len(stack)}")
    kinds = tuple(_kind(layer, config, index) for index, layer in enumerate(stack))
    return Stack(path, kinds, (_choose_with_neighbours if neighbours else choose_layers)(kinds, layers))


def why_no_step(model: Any) -> str:
    """What keeps a model without a head over a vocabulary from a step on text alone; empty where there is such a head."""
    own = model.get_base_model() if hasattr(model, "get_base_model") else model  # what peft has wrapped
    if own.get_output_embeddings() is not None:
        return ""
    pictures = "pixel_values" in signature(own.forward).parameters
    return "reads pictures beside or instead of text" if pictures else "has no head over a vocabulary and so no loss"


def _kind(layer: nn.Module, config: Any, index: int) -> str:
    """What tells a layer's kind: its class, its tensors, and the entry of each per-layer list of the config."""
    tensors = [(name, tuple(tensor.shape)) for name, tensor in layer.named_parameters()]
    entries = [(name, values[index]) for name, values in per_layer_lists(config).items()]
    return f"{type(layer).__name__} {tensors} {entries}"


def per_layer_lists(config: Any) -> dict[str, list[Any]]:
    """The config's lists that have one entry a layer (`layer_types` and its kind)."""
    count = config.num_hidden_layers
    return {
        name: list(value)
        for name, value in vars(config).items()
        if isinstance(value, (list, tuple)) and len(value) == count and not isinstance(value, str)
    }


def choose_layers(kinds: Sequence[str], layers: int | None) -> tuple[int, ...]:
    """For each layer the one that is run in its place. First and last stand for themselves, and so do `layers` in all at least."""
    count = len(kinds)
    if layers == 0 or (layers is not None and layers >= count):
        return tuple(range(count))
    chosen = {0, count - 1}
    inner: dict[str, int] = {}
    for index in range(1, count - 1):
        inner.setdefault(kinds[index], index)
    chosen |= set(inner.values())
    for index in range(1, count - 1):
        if len(chosen) >= (layers or 0):
            break
        chosen.add(index)
    return tuple(index if index in chosen else inner[kinds[index]] for index in range(count))


def _choose_with_neighbours(kinds: Sequence[str], layers: int | None) -> tuple[int, ...]:
    """The same, with a layer's kind told by its neighbours too; all are run where the chosen ones meet other neighbours."""
    around = _with_neighbours(kinds)
    chosen = choose_layers(around, layers)
    run = sorted(set(chosen))
    met = _with_neighbours([kinds[index] for index in run])
    return chosen if met == [around[index] for index in run] else tuple(range(len(kinds)))


def _with_neighbours(kinds: Sequence[str]) -> list[str]:
    padded = ["", *kinds, ""]
    return [" | ".join(padded[index : index + 3]) for index in range(len(kinds))]


def cut(model: nn.Module, stack: Stack) -> None:
    """Take the layers that are not run out of the model."""
    if len(stack.run) == len(stack.kinds):
        return
    whole = model.get_submodule(stack.path)
    assert isinstance(whole, nn.ModuleList)
    parent, _, name = stack.path.rpartition(".")
    setattr(model.get_submodule(parent), name, nn.ModuleList(whole[index] for index in stack.run))
    config = text_config(model)
    for key, values in per_layer_lists(config).items():
        setattr(config, key, [values[index] for index in stack.run])
    config.num_hidden_layers = len(stack.run)


def text_config(model: nn.Module) -> Any:
    """The config of the language model's stack."""
    config: Any = model.config
    return config.get_text_config()


def materialize(model: nn.Module) -> None:
    """Replace each meta parameter and buffer by one with a fake storage of its own (ties stay ties). Call under FakeTensorMode."""
    made: dict[int, nn.Parameter] = {}
    fill_quantised(model, made)
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is None:
                continue
            if id(parameter) not in made:
                empty = torch.empty(parameter.shape, dtype=parameter.dtype)
                made[id(parameter)] = nn.Parameter(empty, requires_grad=parameter.requires_grad)
            module._parameters[name] = made[id(parameter)]
        for name, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
