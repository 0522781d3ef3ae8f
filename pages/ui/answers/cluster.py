"""Views of a training run on many GPUs: days and money from measured kernels, the step by part, layouts, FLOPs by convention."""

from __future__ import annotations

from typing import Any, Final

import streamlit as st

from calc.commands import COMMANDS
from calc.compute import ComputeAnswer
from calc.errors import InputError
from calc.planner import Layout, SearchAnswer, SearchPlan
from calc.step_time import TimeAnswer, TimePlan
from calc.training import TrainingAnswer, TrainingPlan
from pages.ui import charts, link, names, parts, scenario, widgets
from pages.ui.charts import Band, Curve
from pages.ui.fields import fields_of
from pages.ui.numbers import Figure, Numbers, figures
from pages.ui.scenario import Scenario
from pages.ui.text import plain

_AROUND: Final = range(-4, 5)  # doublings of the number of GPUs that a curve shows
_DAY: Final = 86400
_FOUND: Final = "layouts found"
_TAKEN: Final = (
    *(
        "tp",
        "pp",
        "cp",
        "ep",
        "dp",
        "dp_replicate",
        "zero",
        "virtual_stages",
        "micro_batch",
        "global_batch",
        "recompute",
        "schedule",
    ),
    *("recipe", "implementation", "optimizer_kernel"),
)


def picture(answer: ComputeAnswer, numbers: Numbers, asked: Scenario) -> None:
    """The estimate from measured kernels as a sentence, and the parts of the step that it sums."""
    try:
        found = _timed(asked, {})
    except InputError as error:
        st.info(plain(f"No time from measured kernels: {error}"))
        charts.stacked(
            {"training": parts.by_role(answer.causal.breakdown)},
            "FLOPs",
            numbers,
            "flops bar",
            "Training FLOPs by part",
        )
        return
    _sentence(found, asked, numbers)
    charts.stacked(
        {"one step": parts.of_time(found.breakdown)},
        "seconds",
        numbers,
        "step bar",
        "Seconds of one training step by part",
    )


def _timed(asked: Scenario, values: dict[str, Any]) -> TimeAnswer:
    answer = COMMANDS["time"].answer(asked.changed(values).of(TimePlan), asked.spec(), asked.gpu())
    assert isinstance(answer, TimeAnswer)
    return answer


def _sentence(found: TimeAnswer, asked: Scenario, numbers: Numbers) -> None:
    """`1T tokens on 256 × NVIDIA H100 SXM 80 GB: 4.9 days ...`, red where the step does not fit; below, what it rests on."""
    run, plan, share = found.run, found.plan, (found.low / found.step_seconds, found.high / found.step_seconds)
    tokens = fields_of(TimePlan)["tokens"].shown(plan.tokens or plan.tokens_of_step)
    days = f"**{numbers.show(run.seconds, 'seconds')}** ({numbers.show(run.seconds * share[0], 'seconds')} to "
    days += f"{numbers.show(run.seconds * share[1], 'seconds')})"
    cost = "" if run.cost is None else f", **${run.cost:,.0f}** at ${found.price.dollars:,.2f} a GPU-hour"
    memory = COMMANDS["train"].answer(asked.of(TrainingPlan), asked.spec(), asked.gpu())
    assert isinstance(memory, TrainingAnswer)
    needs = f"{numbers.show(memory.driver_bytes)} of {numbers.show(memory.gpu_memory_bytes)} per GPU"
    box, fits = {
        True: (st.success, f"It fits in memory: {needs}"),
        False: (st.error, f"But it **does not fit** in memory: {needs}; the Train page says what to change"),
        None: (st.info, "Whether it fits is unknown: so is the GPU's memory"),
    }[memory.fits]
    box(f"{tokens} tokens on {plan.gpus:,} × {plain(asked.gpu_name)} take {days}{cost}. {fits}.")
    st.caption(
        f"One step takes {numbers.show(found.step_seconds, 'seconds')}: MFU {numbers.percent(found.mfu)}, HFU "
        f"{numbers.percent(found.hfu)}, {numbers.count(found.tokens_per_s_per_gpu)} tokens/s on each GPU, from {plain(_source(found))}."
    )


def _source(found: TimeAnswer) -> str:
    """Where the seconds are from, with the GPU's name as people know it."""
    kind, _, name = found.source.partition(" ")
    return (
        f"the measured kernels of {names.DEVICES[name]}" if kind == "table" and name in names.DEVICES else found.source
    )


def figures_of(answer: ComputeAnswer, numbers: Numbers, asked: Scenario) -> list[Figure]:
    """The four figures under the bar: by measured kernels, or by the given MFU where those say nothing."""
    try:
        found = _timed(asked, {})
    except InputError:
        return _by_mfu(answer, numbers)
    run, price = found.run, found.price
    return [
        Figure(
            "Time",
            numbers.show(run.seconds, "seconds"),
            "Steps of the run · seconds of one step",
            run.seconds,
            "seconds",
        ),
        Figure("GPU-hours", numbers.count(run.gpu_hours), "Time · GPUs", run.gpu_hours),
        Figure(
            "Cost",
            "unknown" if run.cost is None else f"${run.cost:,.0f}",
            f"GPU-hours · price of a GPU-hour ({price.source}); the sidebar takes another price",
            run.cost,
        ),
        _energy(run.energy_kwh, numbers),
    ]


def _energy(kwh: float | None, numbers: Numbers) -> Figure:
    said = f"{numbers.count(kwh, ' kWh')}: GPU-hours · board power · share drawn · PUE"
    return Figure("Energy", numbers.show(kwh, "kWh"), said, kwh)


def _by_mfu(answer: ComputeAnswer, numbers: Numbers) -> list[Figure]:
    causal, mfu = answer.causal, numbers.percent(answer.causal.mfu)
    return [
        Figure(
            f"Time at MFU {mfu}",
            numbers.show(causal.seconds, "seconds"),
            "Model FLOPs (causal) over GPUs · dense peak · MFU",
            causal.seconds,
            "seconds",
        ),
        Figure(f"GPU-hours at MFU {mfu}", numbers.count(causal.gpu_hours), "", causal.gpu_hours),
        Figure(
            "Cost",
            numbers.count(causal.cost),
            "In the currency of the price; set the price of a GPU-hour in the sidebar to see it",
            causal.cost,
        ),
        _energy(causal.energy_kwh, numbers),
    ]


def given_mfu(answer: ComputeAnswer, numbers: Numbers, _: Scenario) -> None:
    """The same run by an MFU that is set by hand, or that a known run's GPU-hours give: no kernel is asked."""
    st.markdown("An MFU by hand, or the GPU-hours of a known run, replace the kernels here; both are in the sidebar.")
    figures(_by_mfu(answer, numbers), "figures of a given MFU")


def against_gpus(answer: ComputeAnswer, numbers: Numbers, asked: Scenario) -> None:
    """Days against the number of GPUs, fully sharded over all of them, with the band of the estimate."""
    middle, band = [], []
    for count in sorted({max(1, round(asked.gpus * 2.0**power)) for power in _AROUND}):
        try:
            found = _timed(Scenario({**asked.values, "layout": "auto"}), {"gpus": count})
        except InputError:
            continue
        days = found.run.seconds / _DAY
        middle.append((float(count), days))
        low, high = (days * end / found.step_seconds for end in (found.low, found.high))
        band.append((float(count), low, high))
    charts.title("Days against GPUs: FSDP over all of them, communication included")
    charts.curves(
        [Curve("estimate", middle)], "GPUs", "days", numbers, "days", "Days of training against GPUs",
        now=float(asked.gpus), steep=True, band=Band("from low to high", band),
    )  # fmt: skip


def conventions(answer: ComputeAnswer, numbers: Numbers, _: Scenario) -> None:
    """The same training by three conventions of counting."""
    causal, full = answer.causal, answer.full
    rows = {
        "model FLOPs (causal)": parts.by_role(causal.breakdown),
        "model FLOPs (full attention)": parts.by_role(full.breakdown),
        "6ND estimate": [("6ND estimate", float(causal.six_nd_flops))],
    }
    charts.stacked(rows, "FLOPs", numbers, "conventions", "Training FLOPs by three conventions")
    charts.title(
        f"MFU {numbers.percent(causal.mfu)}; {numbers.percent(answer.six_nd_mfu)} where 6ND is what is counted; "
        f"HFU {numbers.percent(causal.hfu)}"
    )


def layouts(answer: ComputeAnswer, numbers: Numbers, asked: Scenario) -> None:
    """The layouts that fit on these GPUs, the fastest first; one of them becomes the scenario."""
    st.markdown(
        "All layouts of Megatron's program (TP, PP, CP, EP, DP, ZeRO, recomputation) on these GPUs; takes a second or two."
    )
    batch = st.number_input("Global batch (sequences)", 1, 2**20, 1024, key="global batch of layouts")
    key = (tuple(sorted(map(str, asked.values.items()))), batch)
    if st.button("Find layouts", icon=":material/search:"):
        plan = SearchPlan(gpus=asked.gpus, seq=answer.plan.seq, global_batch=batch, tokens=answer.plan.tokens, limit=8)
        with st.spinner("Working out layouts …"):
            st.session_state[_FOUND] = (key, COMMANDS["plan"].answer(plan, asked.spec(), asked.gpu()))
    known = st.session_state.get(_FOUND)
    if known and known[0] == key:
        _found(known[1], numbers)


def _found(answer: SearchAnswer, numbers: Numbers) -> None:
    shown = answer.layouts[: answer.plan.limit]
    if not shown:
        reasons = "; ".join(f"{name}: {count:,}" for name, count in answer.rejected.items())
        st.warning(plain(f"None of {answer.considered:,} layouts fits. {reasons}"))
        return
    rows = [each.as_json(answer.layouts[0]) for each in shown]
    columns = ("tp", "pp", "virtual_stages", "cp", "ep", "dp", "dp_replicate", "zero", "micro_batch", "recompute")
    table: dict[str, list[Any]] = {name.replace("_", " "): [row[name] for row in rows] for name in columns}
    table["GPU memory"] = [numbers.show(row["driver_bytes"]) for row in rows]
    table["step"] = [numbers.show(row["step_seconds"], "seconds") for row in rows]
    table["MFU"] = [numbers.percent(row["mfu"]) for row in rows]
    table["slower by"] = [row["slower_by"] for row in rows]
    st.dataframe(table, hide_index=True, alt="Layouts that fit, the fastest first")
    st.caption(
        f"{answer.considered:,} layouts considered, {answer.worked_out:,} timed exactly, {answer.fitting:,} "
        + ("fit." if answer.exact else "of the fastest fit and are shown.")
    )
    chosen = st.selectbox("Layout", range(len(shown)), format_func=lambda at: _name(shown[at]))
    st.button("Take this layout", on_click=_take, args=(shown[chosen],), icon=":material/check:")


def _name(layout: Layout) -> str:
    plan = layout.plan
    return f"TP {plan.tp} · PP {plan.pp} · CP {plan.cp} · EP {plan.ep} · DP {plan.dp}, micro-batch {plan.micro_batch}"


def _take(layout: Layout) -> None:
    """Make the layout the scenario's, for the pages that train."""
    link.touched()
    fields = fields_of(TrainingPlan)
    values = {fields[name].key: getattr(layout.plan, name) for name in _TAKEN}
    widgets.take(scenario.current().changed({**values, "layout": "by hand"}))
