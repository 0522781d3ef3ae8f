"""Every class of transformers that writes text, its trunk and its other heads: the default config is counted exactly or refused."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from calc.errors import InputError
from calc.model.config import from_config
from calc.parameters import parameters
from tests.calc.model.meta_model import ALONE
from tests.recorded.class_counts import default_classes

# transformers tells of token ids beyond a default's vocabulary, where a program runs again
pytestmark = [pytest.mark.recorded, pytest.mark.filterwarnings("ignore")]

# What a class builds and neither fills nor runs: LongCat-Flash's first projections of 256 zero experts in 28 layers
UNUSED = dict.fromkeys(("LongcatFlashForCausalLM", "LongcatFlashModel"), 28 * 256 * 2 * 2048 * 6144)
# kind of class -> how many of them must be exact
LEAST = {"causal": 148, "conditional": 24, "other head": 300}


def kind_of(name: str) -> str:
    if name.endswith(("ForCausalLM", "LMHeadModel")):
        return "causal"
    return "conditional" if name.endswith("ForConditionalGeneration") or name in ALONE else "other head"


def verdict(name: str, config: dict[str, object], count: int) -> str:
    """Whether our count of the class is exact."""
    try:
        spec = from_config(config)
        ours = parameters(spec).total
    except InputError:
        return "refused"
    if any(note.startswith(f"{name} is not understood: counted is ") for note in spec.notes):
        # a trunk alone has no head, which its text model has
        return "wrong" if kind_of(name) != "other head" and ours > count else "text alone"
    return "exact" if ours + UNUSED.get(name, 0) == count else "wrong"


def test_the_default_config_of_every_class_is_exact_or_refused(capsys):
    found: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for name, config, count in default_classes():
        outcome = "not built" if config is None or count is None else verdict(name, config, count)
        found[kind_of(name)][outcome].append(name)
    with capsys.disabled():
        for kind, verdicts in found.items():
            counts = Counter({outcome: len(names) for outcome, names in verdicts.items()})
            print(
                f"\n{kind} classes of transformers: {', '.join(f'{n} {outcome}' for outcome, n in counts.items())}",
                end="",
            )
    assert {kind: verdicts["wrong"] for kind, verdicts in found.items() if verdicts["wrong"]} == {}
    for kind, least in LEAST.items():
        assert len(found[kind]["exact"]) >= least, kind
