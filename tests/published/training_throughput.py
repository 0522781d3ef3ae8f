"""Published throughput of training runs against the predicted step: the errors, the ranking of layouts, and the planner's gain.

`python -m tests.published.training_throughput [FILE]` prints the errors; with `--layouts` what the planner's best layout gains.
"""

from __future__ import annotations

import json
import sys
from functools import cache
from itertools import combinations
from pathlib import Path
from statistics import median

from calc.errors import InputError
from calc.planner import Layout, SearchAnswer, SearchPlan, search
from calc.planner.candidates import OFFLOAD, RECOMPUTE
from calc.planner.search import time_plan
from calc.step_time import step_time
from calc.training import train
from tests.published.throughput_rows import Case, case_of

FILE = Path(__file__).parent / "training_throughput.json"


def cases(path: Path = FILE) -> list[Case]:
    return [case_of(row) for row in json.loads(path.read_text(encoding="utf-8"))]


def compared(found: list[Case]) -> list[Case]:
    """The rows that count: predicted, high confidence, nothing important left open."""
    return [one for one in found if one.plan and not one.apart and one.row["confidence"] == "high" and one.measured]


def percentile(values: list[float], share: float) -> float:
    ordered = sorted(values)
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def family(case: Case) -> str:
    source = case.row["source"]
    if "llm-foundry" in source:
        return "llm-foundry " + source.split("[")[1].rstrip("]")[:20]
    if "performance-summary" in source:
        return "Megatron-Bridge " + source.split("[")[1][:8]
    return source.removeprefix("github ")[:44]


_searched = cache(search)  # rows of one run differ in their layout alone


def gains(found: list[Case]) -> None:
    """Prints what the planner's best layout of each run gains over the one used."""
    for one in found:
        answer, used = best_and_used(one)
        if used is None or not answer.layouts:
            print(f"{one.row['id']:44} the memory model refuses the layout used, or it does not fit")
            continue
        best = answer.layouts[0]
        gain = used.time.step_seconds / best.time.step_seconds - 1
        print(f"{one.row['id']:44} {100 * gain:+6.1f} %  {used.as_json(best)['slower_by']}")


def best_and_used(case: Case) -> tuple[SearchAnswer, Layout | None]:
    """The planner's answer for a row's run, and the row's own layout with the options that the planner takes; None where the memory model
    refuses it or finds no room for it."""
    assert case.spec
    assert case.gpu
    used = case.plan
    assert used
    run = ("gpus", "seq", "recipe", "matmul", "implementation", "inter_GBps", "gpus_per_node")
    asked = SearchPlan(global_batch=used.batch, **{name: getattr(used, name) for name in run})
    names = ("tp", "pp", "cp", "ep", "dp", "dp_replicate", "zero", "micro_batch", "virtual_stages")
    row = {name: getattr(used, name) for name in names}
    layout = time_plan(
        asked, row | {"recompute": RECOMPUTE.index(used.recompute), "offload": OFFLOAD.index(used.offload)}
    )
    found = _searched(case.spec, asked, case.gpu)
    try:
        memory = train(case.spec, layout, case.gpu)
    except InputError:  # such as embedding and head counted as layers of the pipeline, which `train` does not take
        return found, None
    own = Layout(layout, memory.peak_bytes, memory.driver_bytes, step_time(case.spec, layout, case.gpu))
    return found, own if memory.fits else None


def pairs(found: list[Case]) -> list[tuple[Case, Case, bool]]:
    """Pairs of one source, model, GPU, count, sequence and precision with two layouts that differ by over 3 %: whether ranked right."""
    made = []
    for a, b in combinations(found, 2):
        ca, cb = a.row["config"], b.row["config"]
        same = a.row["model"] == b.row["model"] and all(
            str(ca.get(key)) == str(cb.get(key)) for key in ("gpu", "n_gpus", "seq_len", "precision", "layers")
        )
        if not same or family(a).split()[0] != family(b).split()[0] or a.plan == b.plan:
            continue
        if abs(a.measured / b.measured - 1) < 0.03:
            continue
        ours = a.answer().tokens_per_s_per_gpu > b.answer().tokens_per_s_per_gpu
        made.append((a, b, ours == (a.measured > b.measured)))
    return made


def main(path: Path = FILE) -> None:
    found = cases(path)
    good = compared(found)
    groups: dict[str, list[Case]] = {}
    for one in found:
        if one.plan and one.measured:
            try:
                one.error()
            except ValueError as error:
                print(one.row["id"], error)
                good = [g for g in good if g is not one]
                continue
            mark = "" if one in good else f"   (apart: {one.apart or one.row['confidence']})"
            print(
                f"{one.row['id']:44} {one.row['model'][:22]:22} {one.measured:9.0f} {100 * one.error():+7.1f} %{mark}"
            )
    for one in found:
        if one.skipped and one.row["model"]:
            print(f"{one.row['id']:44} not predicted: {one.skipped}")
    for one in good:
        groups.setdefault(family(one), []).append(one)
    for name, members in {
        **groups,
        "dense": [c for c in good if not c.experts],
        "experts": [c for c in good if c.experts],
    }.items():
        errors = [one.error() for one in members]
        sizes = [abs(error) for error in errors]
        middle, worst = 100 * median(sizes), 100 * percentile(sizes, 0.9)
        mean = 100 * sum(errors) / len(errors)
        fixed = 100 * median(abs(one.baseline()) for one in members)
        errors_told = f"mean {mean:+6.1f}  median {middle:5.1f}  p90 {worst:5.1f}  (MFU of 0.40: median {fixed:5.1f})"
        print(f"{name:40} {len(members):4} rows  {errors_told}")
    ranked = pairs(good)
    right = sum(ok for _, _, ok in ranked)
    print(f"pairs of layouts ranked right: {right} of {len(ranked)}")
    for a, b, ok in ranked:
        if not ok:
            print("   wrong:", a.row["id"], b.row["id"])


if __name__ == "__main__":
    if "--layouts" in sys.argv:
        gains(compared(cases()))
    else:
        main(*(Path(word) for word in sys.argv[1:]))
