"""What `serve --suggest` adds: every value that it names fits, and the next one does not."""

from __future__ import annotations

import json

import pytest

from calc.catalogue import load
from calc.cli import run
from calc.hardware import gpu, gpus
from calc.serving import ServingPlan, serve, serve_and_suggest
from calc.serving.advice import suggest, users_by_context

CASES = [
    ("logical", "llama-2-7b", "rtx-4090-24gb", {"context": 4096, "concurrency": 2}),
    ("vllm", "qwen3-32b", "h100-sxm-80gb", {"context": 32_768, "concurrency": 8}),
    ("sglang", "meta-llama-3.1-8b", "rtx-4090-24gb", {"context": 8192}),
    ("llama.cpp", "meta-llama-3.1-70b", "rtx-3090-24gb", {"weights": "gguf-Q4_K_M", "kv_dtype": "fp16"}),
]


@pytest.mark.parametrize(("engine", "model", "card", "plan"), CASES)
def test_the_largest_values_fit_and_one_more_does_not(engine, model, card, plan):
    spec, on = load(model), gpu(card)
    found = serve_and_suggest(spec, ServingPlan(engine=engine, **plan), on)
    for field, value in (("context", found.longest_context), ("concurrency", found.most_users)):
        if value:
            assert serve(spec, ServingPlan(engine=engine, **plan | {field: value}), on).capacity.fits
            if value < (spec.max_position_embeddings if field == "context" else 100_000):
                assert not serve(spec, ServingPlan(engine=engine, **plan | {field: value + 1}), on).capacity.fits
        else:
            assert not serve(spec, ServingPlan(engine=engine, **plan | {field: 1}), on).capacity.fits


@pytest.mark.parametrize(("engine", "model", "card", "plan"), CASES)
def test_every_change_makes_it_fit(engine, model, card, plan):
    spec, on = load(model), gpu(card)
    answer = serve(spec, ServingPlan(engine=engine, **plan), on)
    found = suggest(answer)
    assert bool(found.fixes) is not answer.capacity.fits
    for change in found.fixes:
        values = dict(change.values)
        other = gpus()[values.pop("gpu")] if "gpu" in values else on
        after = serve(spec, ServingPlan(engine=engine, **plan | values), other)
        assert after.capacity.fits
        assert change.needed == after.capacity.needed


def test_the_fewest_and_the_smallest_gpu():
    found = serve_and_suggest(load("meta-llama-3.1-70b"), ServingPlan(engine="vllm"), gpu("h100-sxm-80gb"))
    assert found.gpus_needed == 2  # 131 GiB of weights on cards of 79
    smaller = serve_and_suggest(load("llama-2-7b"), ServingPlan(), gpu("h100-sxm-80gb")).smallest_gpu
    assert gpus()[smaller].memory_bytes < gpu("rtx-4090-24gb").memory_bytes


def test_the_reason_says_why_one_more_fails():
    out = json.loads(run(["serve", "llama-2-7b", "--gpu", "a100-sxm-80gb", "--suggest", "--format", "json"]))
    assert out["longest_context"] == 4096
    assert "4,096 tokens: the model has no more positions" in out["notes"]
    assert any("one more needs" in note for note in out["notes"])
    assert "fixes" in out
    assert out["fixes"] == []


def test_without_a_gpu_nothing_is_suggested():
    found = serve_and_suggest(load("llama-2-7b"), ServingPlan())
    assert (found.longest_context, found.most_users, found.gpus_needed, found.fixes) == (None, None, None, ())


def test_the_map_of_contexts_and_users_is_that_of_single_answers():
    spec, on = load("meta-llama-3.1-8b"), gpu("rtx-4090-24gb")
    contexts, users = (512, 4096, 16_384), (1, 2, 4, 8, 16)
    for engine in ("logical", "vllm"):
        edge = users_by_context(spec, ServingPlan(engine=engine), on, contexts, users)
        for context, count in zip(contexts, edge, strict=True):
            fits = [
                serve(spec, ServingPlan(engine=engine, context=context, concurrency=user), on).capacity.fits
                for user in users
            ]
            assert fits == [at < count for at in range(len(users))]
