"""Files as people do not mean them: configs, declared formats, adapters and YAML with a part replaced, cut, doubled or misspelt.

`python -m tests.calc.sources.mutated_inputs 100000` runs so many and prints what came of them.
"""

from __future__ import annotations

import copy
import json
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from calc.errors import InputError
from calc.model.config import from_config, parse_config
from calc.parameters import parameters
from calc.sources.adapters import adapter_note
from calc.sources.files import parse_yaml
from calc.sources.find import find_at

LLAMA = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "vocab_size": 96,
    "rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 2048},
}
DECLARED: list[dict[str, Any]] = [
    {
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
        "modules_to_not_convert": ["lm_head", "model.layers.0.mlp"],
    },
    {
        "quant_method": "gptq",
        "bits": 4,
        "group_size": 128,
        "desc_act": True,
        "dynamic": {"-:.*k_proj": {}, "+:.*q.*": {"bits": 8}},
    },
    {"quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm"},
    {
        "quant_method": "bitsandbytes",
        "load_in_4bit": True,
        "bnb_4bit_quant_type": "nf4",
        "llm_int8_skip_modules": ["lm_head"],
    },
    {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "ignore": ["lm_head", "re:.*self_attn.*", "re:(a+)+$"],
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32},
            }
        },
        "kv_cache_scheme": {"num_bits": 8, "type": "float"},
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4",
        "group_size": 16,
        "exclude_modules": ["lm_head", "model.layers.*.mlp*"],
    },
    {
        "quant_method": "modelopt",
        "quant_algo": "MIXED_PRECISION",
        "quantized_layers": {"model.layers.0.mlp.up_proj": {"quant_algo": "FP8"}},
    },
    {
        "quant_method": "torchao",
        "quant_type": {"default": {"_type": "Int4WeightOnlyConfig", "_data": {"group_size": 32}}},
    },
    {
        "quant_method": "quark",
        "global_quant_config": {"weight": {"dtype": "fp4", "group_size": 32}},
        "exclude": ["lm_head"],
    },
    {"quant_method": "aqlm", "in_group_size": 8, "num_codebooks": 1, "nbits_per_codebook": 16},
    {"quant_method": "hqq", "quant_config": {"weight_quant_params": {"nbits": 4, "group_size": 64}}},
    {"bits": 4, "group_size": 64, "mode": "affine", "model.layers.0.mlp.down_proj": {"bits": 8, "group_size": 64}},
]
OTHERS: list[dict[str, Any]] = [
    {"dim": 64, "n_layers": 2, "head_dim": 16, "hidden_dim": 128, "n_heads": 4, "n_kv_heads": 2, "vocab_size": 96},
    {"d_model": 64, "n_layer": 2, "vocab_size": 90, "ssm_cfg": {"layer": "Mamba2"}, "pad_vocab_size_multiple": 8},
    {"num-layers": 2, "hidden-size": 64, "num-attention-heads": 4, "pos-emb": "rotary", "seq-length": 128},
    {
        "model": {
            "num_layers": 2,
            "hidden_size": 64,
            "ffn_hidden_size": 128,
            "num_attention_heads": 4,
            "vocab_size": 96,
        },
        "trainer": {},
    },
    {"architectures": ["NoVLModel"], "text_config": {**LLAMA}, "vision_config": {"hidden_size": 8}},
    {
        "architectures": ["LlamaForSequenceClassification"],
        **{key: LLAMA[key] for key in LLAMA if key != "architectures"},
        "num_labels": 3,
    },
]
ADAPTER = {
    "peft_type": "LORA",
    "base_model_name_or_path": "llama",
    "r": 8,
    "target_modules": ["q_proj", "v_proj"],
    "modules_to_save": ["lm_head"],
}
ODD = (
    None,
    True,
    -1,
    0,
    3,
    2**70,
    1e308,
    float("inf"),
    "",
    "x",
    "\0",
    "re:(a|b)*c",
    [],
    [[]],
    {},
    {"a": {"b": []}},
    ["*"] * 9,
    "9" * 5000,
)


def bases() -> Iterator[dict[str, Any]]:
    for declaration in DECLARED:
        yield {**LLAMA, "quantization_config": declaration}
    yield from OTHERS


def changed(value: Any, chance: random.Random) -> Any:
    """The value with one of its parts replaced, taken away, doubled or put elsewhere."""
    if isinstance(value, dict) and value and chance.random() < 0.9:
        made = copy.copy(value)
        key = chance.choice(list(made))
        what = chance.random()
        if what < 0.6:
            made[key] = changed(made[key], chance)
        elif what < 0.7:
            del made[key]
        elif what < 0.8:
            made[str(key)[:-1] or "x"] = made.pop(key)
        else:
            made[chance.choice(list(made))] = made[key]
        return made
    if isinstance(value, list) and value and chance.random() < 0.7:
        made = list(value)
        at = chance.randrange(len(made))
        made[at] = changed(made[at], chance)
        return made * chance.choice((1, 1, 50))
    return chance.choice(ODD)


def cut(text: str, chance: random.Random) -> str:
    """The text with a few letters taken away, doubled or replaced."""
    for _ in range(chance.randrange(1, 4)):
        at = chance.randrange(len(text) + 1)
        text = (
            text[:at]
            + chance.choice(("", "", '"', "{", "]", "\n", "*", "&a ", ": ", ",", "'", "9", "\x00"))
            + text[at + chance.randrange(9) :]
        )
    return text


def read(text: str, kind: str, folder: Path) -> None:
    """Read a mutated file as its kind is read."""
    if kind == "yaml":
        parameters(from_config(parse_yaml(text.encode("utf-8", "replace"))))
    elif kind == "adapter":
        adapter_note(parse_config(text), from_config(LLAMA))
    elif kind == "folder":
        (folder / "config.json").write_text(text, encoding="utf-8", errors="replace")
        parameters(find_at(folder, stored=True).spec())
    else:
        answer = parameters(from_config(parse_config(text)))
        assert answer.stored_bytes >= 0


def run(count: int, seed: int = 0) -> tuple[Counter[str], float]:
    """Outcomes of so many mutated files, and the longest seconds of the processor for one. Whatever is no InputError is raised."""
    chance = random.Random(seed)
    starts = list(bases())
    found: Counter[str] = Counter()
    longest = 0.0
    with TemporaryDirectory() as name:
        for _ in range(count):
            kind = chance.choice(("config", "config", "config", "yaml", "adapter", "folder"))
            base: Any = ADAPTER if kind == "adapter" else chance.choice(starts)
            for _ in range(chance.randrange(1, 4)):
                base = changed(base, chance)
            text = json.dumps(base)
            if chance.random() < 0.3:
                text = cut(text, chance)
            begun = time.process_time()
            try:
                read(text, kind, Path(name))
                found[f"{kind}: read"] += 1
            except InputError as error:
                if "\n" in str(error):
                    raise AssertionError(f"two lines: {error}") from error
                found[f"{kind}: refused"] += 1
            except Exception:
                print(kind, text[:2000], file=sys.stderr)
                raise
            longest = max(longest, time.process_time() - begun)
    return found, longest


if __name__ == "__main__":
    outcomes, slowest = run(int(sys.argv[1]), int(sys.argv[2]) if len(sys.argv) > 2 else 0)
    print(dict(sorted(outcomes.items())), f"longest {slowest:.3f} s")
