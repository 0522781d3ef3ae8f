"""Reading a config.json: every field that matters is checked, every default taken is told, every field left over is named."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any, Final

from calc.errors import InputError

LARGEST: Final = 2**24  # no width, vocabulary or context in use comes near; keeps every product a small integer
MOST_LAYERS: Final = 4096
_MOST_UNREAD: Final = 60  # names of fields that nothing reads, of which a config may hold megabytes
_LONGEST: Final = 80
# What makes a model this model: no class default stands in for these, except in a nested config that leaves them out.
MUST_BE_GIVEN: Final = frozenset(
    "hidden_size n_embd n_embed d_model num_hidden_layers n_layer n_layers num_layers decoder_layers num_attention_heads "
    "n_head n_heads num_heads attention_heads decoder_attention_heads vocab_size".split()
)

# Fields that change neither a count, a byte nor a FLOP of ours: tokens, initialisation, generation, bookkeeping.
IGNORED = frozenset(
    """
    _name_or_path architectures model_type transformers_version torch_dtype dtype use_cache bos_token_id
    eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id decoder_start_token_id
    forced_bos_token_id forced_eos_token_id begin_suppress_tokens suppress_tokens initializer_range
    initializer_factor init_std rms_norm_eps layer_norm_eps layer_norm_epsilon norm_eps norm_epsilon
    layernorm_epsilon rope_theta rope_scaling rope_parameters rope_local_base_freq rotary_pct partial_rotary_factor
    rotary_dim rotary_emb_base rope_interleave pretraining_tp auto_map return_dict output_attentions
    output_hidden_states output_router_logits torchscript use_bfloat16 pruned_heads chunk_size_feed_forward
    is_encoder_decoder is_decoder add_cross_attention tie_encoder_decoder finetuning_task id2label label2id
    task_specific_params problem_type tokenizer_class prefix max_length min_length do_sample early_stopping
    num_beams num_beam_groups diversity_penalty temperature top_k top_p typical_p repetition_penalty length_penalty
    no_repeat_ngram_size encoder_no_repeat_ngram_size bad_words_ids num_return_sequences output_scores
    return_dict_in_generate remove_invalid_values exponential_decay_length_penalty router_aux_loss_coef
    router_z_loss_coef router_jitter_noise aux_loss_alpha seq_aux norm_topk_prob topk_method n_group topk_group
    scoring_func routed_scaling_factor score_func image_token_id image_token_index video_token_id
    vision_start_token_id vision_end_token_id audio_token_id boi_token_id eoi_token_id attn_pdrop resid_pdrop
    embd_pdrop attention_dropout hidden_dropout summary_activation summary_first_dropout summary_proj_to_labels
    summary_type summary_use_proj gradient_checkpointing reorder_and_upcast_attn scale_attn_by_inverse_layer_idx
    scale_attn_weights cache_implementation quantization_config compression_config license unsloth_version
    unsloth_fixed mlp_dropout hidden_dropout_prob attention_probs_dropout_prob ep_size query_pre_attn_scalar
    _attn_implementation attn_implementation cross_attention_hidden_size
    """.split()
)


class Fields:
    """Typed access to a config's fields, under any of their names.

    A missing field takes the default of its model class, told in `assumptions`; without a default it is an InputError.
    """

    def __init__(
        self,
        data: Mapping[str, Any],
        where: str = "",
        root: Fields | None = None,
        defaults: Mapping[str, Mapping[str, Any]] | None = None,
    ) -> None:
        self.data = data
        self.where = where
        self.class_defaults: Mapping[str, Mapping[str, Any]] = root.class_defaults if root else (defaults or {})
        self.defaults = self.class_defaults.get(where, {})
        self.used: set[str] = set()
        self.assumptions: list[str] = [] if root is None else root.assumptions
        self.sections: list[Fields] = []

    def name(self, key: str) -> str:
        """The field's full name, for messages: `text_config.hidden_size`."""
        return f"{self.where}.{key}" if self.where else key

    def has(self, *keys: str) -> bool:
        """Whether any of the names is there and not null; looking does not count as reading."""
        return any(self.data.get(key) is not None for key in keys)

    def _take(self, keys: tuple[str, ...], tell: bool = True) -> tuple[str, Any]:
        """The first of the names that is given; where none is even null, the model class's default, which is told."""
        self.used.update(keys)
        for key in keys:
            if self.data.get(key) is not None:
                return key, self.data[key]
        if any(key in self.data for key in keys) or (not self.where and MUST_BE_GIVEN & {*keys}):
            return keys[0], None
        key = next((key for key in keys if key in self.defaults), "")
        if not key:
            return keys[0], None
        if tell:
            self._assume(key, self.defaults[key])
        return key, self.defaults[key]

    def _assume(self, key: str, value: Any) -> None:
        self.assumptions.append(f"{self.name(key)} = {value!r} (not in the config; the model class's default)")

    def _default(self, key: str, default: Any, allowed: str) -> Any:
        if default is None:
            raise InputError(f"{self.name(key)}: missing; {allowed}", self.name(key))
        self._assume(key, default)
        return default

    def size(self, *keys: str, default: int | None = None, low: int = 1, high: int = LARGEST) -> int:
        """A whole number of features, heads, layers or tokens, from `low` to `high`."""
        allowed = f"it must be a whole number from {low} to {high}"
        key, value = self._take(keys)
        given = {name: self.data[name] for name in keys if self.data.get(name) is not None}
        if any(other != value for other in given.values()):
            raise InputError(f"{', '.join(map(self.name, given))} name the same size and must agree", self.name(key))
        if value is None:
            return int(self._default(key, default, allowed))
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise InputError.of(self.name(key), value, allowed)
        return value

    def size_or_none(self, *keys: str, low: int = 1, high: int = LARGEST) -> int | None:
        """A whole number, or None where the field is null, or missing without a default."""
        if self._take(keys, tell=False)[1] is None:
            return None
        return self.size(*keys, low=low, high=high)

    def flag(self, *keys: str, default: bool) -> bool:
        """True or false; null counts as false, as it does in the model classes."""
        key, value = self._take(keys)
        if value is None and any(key in self.data for key in keys):
            return False
        if value is None:
            return bool(self._default(key, default, "it must be true or false"))
        if not isinstance(value, bool):
            raise InputError.of(self.name(key), value, "it must be true or false")
        return value

    def number(self, *keys: str, default: float, low: float = 0.0, high: float = 1e12) -> float:
        """A finite number from `low` to `high`; its default is not worth telling."""
        key, value = self._take(keys, tell=False)
        if value is None:
            return default
        if (
            isinstance(value, bool)
            or not isinstance(value, int | float)
            or not math.isfinite(value)
            or not low <= value <= high
        ):
            raise InputError.of(self.name(key), value, f"it must be a number from {low:g} to {high:g}")
        return float(value)

    def text(self, *keys: str, default: str | None = None) -> str:
        """A short text."""
        key, value = self._take(keys)
        if value is None:
            return str(self._default(key, default, "it must be a text"))
        if not isinstance(value, str) or len(value) > 200:
            raise InputError.of(self.name(key), value, "it must be a text of at most 200 characters")
        return value

    def items(self, *keys: str, length: int | None = None) -> list[Any] | None:
        """A list, of the given length where one is given; None where the field is missing."""
        key, value = self._take(keys)
        if value is None:
            return None
        wanted = f"a list of {length}" if length is not None else f"a list of at most {MOST_LAYERS}"
        if not isinstance(value, list) or len(value) > MOST_LAYERS or (length is not None and len(value) != length):
            raise InputError.of(self.name(key), value, f"it must be {wanted}, one for each layer")
        return value

    def section(self, *keys: str, defaults: Mapping[str, Any] | None = None) -> Fields:
        """A nested config (`text_config`). InputError when it is missing or is not an object. `defaults` are those of the class
        that reads it, where the parent's class does not name one."""
        key, value = self._take(keys)
        if value is None and self.name(key) in self.class_defaults:
            self.assumptions.append(f"{self.name(key)} = the model class's default (not in the config)")
            value = {}
        if value is None:
            raise InputError(f"{self.name(key)}: missing; it must be an object", self.name(key))
        if not isinstance(value, dict):
            raise InputError.of(self.name(key), value, "it must be an object")
        nested = Fields(value, self.name(key), self)
        if defaults is not None:
            nested.defaults = defaults
        self.sections.append(nested)
        return nested

    def divides(self, small: str, small_value: int, large: str, large_value: int) -> None:
        """InputError unless `small` divides `large`."""
        if large_value % small_value:
            raise InputError(
                f"{self.name(small)} ({small_value}) must divide {self.name(large)} ({large_value})", self.name(small)
            )

    def ignore(self, *keys: str) -> None:
        """Fields that this family's counts do not depend on."""
        self.used.update(keys)

    def unread(self) -> list[str]:
        """The names of fields that nothing read and that are not known to be harmless, nested ones included."""
        own = [self.name(key)[:_LONGEST] for key in self.data if key not in self.used and key not in IGNORED]
        found = own + [name for nested in self.sections for name in nested.unread()]
        more = len(found) - _MOST_UNREAD
        return found if more <= 1 else [*found[:_MOST_UNREAD], f"and {more:,} more"]
