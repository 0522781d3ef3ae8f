"""The steps of DPO and GRPO: policy, reference and rollout of transformers models, run with fake tensors.

The steps are written as TRL 1.16's trainers run them; its head that gives log-probabilities and no logits is written below by
what it allocates and saves (trl/kernels/chunked_logprob.py), its kernels making nothing. The program here picks the scored
positions by two indices, where the trainer has a mask: 16 bytes a token that the formula does not have. TRL's own function, its
launches answering nothing, gave the same under this recorder: forward to the byte, backward within 16 KiB in all of these cases.
"""

from __future__ import annotations

import contextlib
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import DynamicCache

from measure.trace.cuda import cuda_choices
from measure.trace.model import build, materialize, quiet
from measure.trace.options import TraceOptions
from measure.trace.recorder import Recorder

TILE_TOKENS, TILE_WORDS = 4096, 32768


class Head(torch.autograd.Function):
    """Log-probabilities of `targets` by tiles: what TRL's head allocates and saves."""

    @staticmethod
    def forward(ctx, hidden, weight, targets, entropy):
        count = len(hidden)
        statistics = [torch.zeros(count) for _ in range(7)]
        tile = torch.empty((min(count, TILE_TOKENS), TILE_WORDS), dtype=hidden.dtype)
        del tile
        log_sum = statistics[0] + torch.log(statistics[1])
        log_probabilities = statistics[6] - log_sum
        spread = log_sum - statistics[2] / statistics[1] if entropy else None
        ctx.save_for_backward(hidden, weight, targets, log_sum, *([spread] if entropy else []))
        return log_probabilities, spread

    @staticmethod
    def backward(ctx, to_log_probabilities, to_entropy):
        hidden, weight = ctx.saved_tensors[:2]
        wants_hidden, wants_weight = ctx.needs_input_grad[:2]
        to_hidden = torch.zeros(hidden.shape) if wants_hidden else None
        to_weight = torch.zeros(weight.shape) if wants_weight else None
        tile = torch.empty((min(len(hidden), TILE_TOKENS), TILE_WORDS), dtype=hidden.dtype)  # noqa: F841
        return (
            to_hidden.to(hidden.dtype) if wants_hidden else None,
            to_weight.to(weight.dtype) if wants_weight else None,
            None,
            None,
        )


class Run:
    """Models on fake tensors under the recorder, and the bytes of each phase's highest point."""

    def __init__(self, config: dict[str, Any], **options: Any) -> None:
        self.config, self.options = config, TraceOptions(**options)
        self.recorder = Recorder({}, 512, False)

    def build(self) -> Any:
        with quiet():
            return build(self.config, self.options)

    def model(self, made: Any) -> Any:
        materialize(made)
        for tensor in (*made.parameters(), *made.buffers()):
            self.recorder.mark(tensor, "states")
        return made

    def held(self) -> int:
        return sum(storage.nbytes for storage in self.recorder.live() if storage.category != "host")

    def peaks(self, start: int, before: int) -> dict[str, int]:
        found: dict[str, int] = {}
        total = before
        for storage, sign, site in self.recorder.events[start:]:
            if storage.category == "host":
                continue
            found.setdefault(site.phase, total)
            total += sign * storage.nbytes
            found[site.phase] = max(found[site.phase], total)
        return found


def score(model: Any, ids: Any, prompt: int, outputs: bool) -> Any:
    """The head's log-probabilities of every completion, at their positions; with `outputs` the other fields too."""
    core = model.get_base_model() if hasattr(model, "get_base_model") else model
    states = core.base_model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
    batch, positions = states.shape[:2]
    mask = torch.ones((batch, positions), dtype=torch.bool)
    count = batch * (ids.shape[1] - prompt)
    rows, columns = torch.zeros(count, dtype=torch.int64), torch.zeros(count, dtype=torch.int64)
    found, entropy = Head.apply(
        states[rows, columns], core.get_output_embeddings().weight, torch.zeros(count, dtype=torch.int64), outputs
    )
    at = found.new_zeros((batch, positions)).index_put((rows, columns), found)
    others = [torch.zeros((batch, positions)) for _ in range(2 if outputs else 0)]
    return at, entropy, others, mask


def dpo_loss(policy: Any, reference: Any, ids: Any, prompt: int) -> Any:
    labels = ids.masked_fill(ids == 0, -100)  # noqa: F841
    scored = score(policy, ids, prompt, True)
    found = scored[0].sum(1)
    if reference is None:
        expected = torch.zeros(len(ids))
    else:
        unadapted = reference.disable_adapter() if reference is policy else contextlib.nullcontext()
        with torch.no_grad(), unadapted:
            expected = score(reference, ids, prompt, False)[0].sum(1)
    chosen, rejected = (found - expected).chunk(2)
    return -torch.nn.functional.logsigmoid(0.1 * (chosen - rejected)).mean()


def train_step(run: Run, loss: Any, optimizer: Any) -> None:
    run.recorder.begin("forward")
    found = loss()
    run.recorder.begin("backward")
    found.backward()
    run.recorder.begin("step")
    optimizer.step()
    for state in optimizer.state.values():
        run.recorder.mark(state["step"], "host")


def run_dpo(
    config: dict[str, Any], with_reference: bool, prompt: int, seq: int, pairs: int, **options: Any
) -> dict[str, int]:
    run = Run(config, seq=seq, micro_batch=2 * pairs, **options)
    built = [run.build() for _ in range(2)]
    with quiet(), cuda_choices(), FakeTensorMode(), run.recorder, run.recorder.saves():
        policy = run.model(built[0])
        adapted = run.options.method == "lora"
        reference = policy if adapted else run.model(built[1]) if with_reference else None
        optimizer = torch.optim.AdamW([p for p in policy.parameters() if p.requires_grad], foreach=True)
        batch = [torch.zeros((2 * pairs, seq), dtype=torch.int64) for _ in range(3)]
        for _ in range(2):
            run.recorder.begin("zero_grad")
            optimizer.zero_grad(set_to_none=True)
            start, before = len(run.recorder.events), run.held()
            train_step(run, lambda: dpo_loss(policy, reference, batch[0], prompt), optimizer)
        return run.peaks(start, before)


def grpo_loss(policy: Any, ids: Any, prompt: int) -> Any:
    found, _, _, _ = score(policy, ids, prompt, True)
    found = found[:, prompt - 1 :]
    ratio = torch.exp(found - found.detach())
    advantages = torch.zeros((len(ids), 1))
    worse = torch.min(ratio * advantages, torch.clamp(ratio, 0.8, 1.2) * advantages)
    return -(worse * torch.ones(found.shape, dtype=torch.int64)).sum() / 100


def generate(run: Run, model: Any, prompt: int, seq: int, count: int) -> None:
    """The prompts, then the last token, with a cache that holds all before it."""
    cache = DynamicCache(config=model.config)
    tokens, _mask = (torch.zeros((count, seq), dtype=torch.int64) for _ in range(2))
    run.recorder.begin("rollout")
    read = model(input_ids=tokens[:, :prompt], past_key_values=cache, use_cache=True, logits_to_keep=1)
    del read
    run.recorder.begin("between")
    for layer in cache.layers:
        shape = (count, layer.keys.shape[1], seq - 2, layer.keys.shape[3])
        layer.keys, layer.values = (torch.zeros(shape, dtype=layer.keys.dtype) for _ in range(2))
    del layer
    run.recorder.begin("rollout 2")
    logits = model(input_ids=tokens[:, :1], past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    scores = logits[:, -1].to(copy=True, dtype=torch.float32)
    probabilities = torch.softmax(scores, -1)
    torch.multinomial(probabilities, 1)


def run_grpo(
    config: dict[str, Any], with_reference: bool, prompt: int, seq: int, completions: int, **options: Any
) -> dict[str, int]:
    run = Run(config, seq=seq, micro_batch=completions, **options)
    built = [run.build() for _ in range(2)]
    with quiet(), cuda_choices(), FakeTensorMode(), run.recorder, run.recorder.saves():
        policy = run.model(built[0])
        reference = run.model(built[1]) if with_reference else None
        optimizer = torch.optim.AdamW(policy.parameters(), foreach=True)
        batch = [torch.zeros((completions, seq), dtype=torch.int64) for _ in range(3)]
        for _ in range(2):
            run.recorder.begin("zero_grad")
            optimizer.zero_grad(set_to_none=True)
            start, before = len(run.recorder.events), run.held()
            with torch.no_grad():
                generate(run, policy, prompt, seq, completions)
                run.recorder.begin("reference")
                if reference is not None:
                    score(reference, batch[0], prompt, False)
            train_step(run, lambda: grpo_loss(policy, batch[0], prompt), optimizer)
        found = run.peaks(start, before)
    return {**found, "rollout": max(found["rollout"], found["rollout 2"])}
