"""A sweep's points are the answers that the functions give one by one, and its CSV holds them exactly."""

from __future__ import annotations

import csv
import io

import pytest

from calc.catalogue import load
from calc.hardware import gpu
from calc.serving import ServingPlan, serve
from calc.training import TrainingPlan, train
from pages import compute, kv_cache, pipeline, training
from pages.ui import charts
from pages.ui.answers import sweep
from pages.ui.charts import Curve
from pages.ui.fields import fields_of
from pages.ui.numbers import Numbers
from pages.ui.scenario import START, Scenario, Spread, spread

NUMBERS = Numbers("GiB")
ON_H100 = Scenario({"gpu": "h100-sxm-80gb"})


def test_memory_against_a_sequence_is_what_train_says_at_each():
    field = fields_of(TrainingPlan)["seq"]
    points = sweep.line(training.QUESTION, ON_H100, field, "GPU memory", NUMBERS)
    shared = {name: START[name] for name in ("recipe", "recompute", "optimizer_kernel")}
    for seq, needed in points:
        plan = TrainingPlan(**shared, seq=int(seq))
        assert needed == train(load("meta-llama-3.1-8b"), plan, gpu("h100-sxm-80gb")).driver_bytes
    assert [at for at, _ in points] == list(field.appearance.stops)


def test_a_sweep_over_gpus_lays_each_number_out_by_itself():
    points = sweep.line(training.QUESTION, ON_H100, fields_of(Spread)["gpus"], "Peak allocated", NUMBERS)
    shared = {name: START[name] for name in ("recipe", "recompute", "optimizer_kernel")}
    plan = TrainingPlan(**shared, **spread(8))
    assert dict(points)[8] == train(load("meta-llama-3.1-8b"), plan, gpu("h100-sxm-80gb")).peak_bytes


def test_a_value_that_other_settings_refuse_has_no_point():
    points = dict(sweep.line(kv_cache.QUESTION, ON_H100, fields_of(ServingPlan)["tp"], "Requests that fit", NUMBERS))
    found = serve(load("meta-llama-3.1-8b"), ServingPlan(tp=2, output=START["output"]), gpu("h100-sxm-80gb"))
    assert points[2] == found.capacity.sequences
    assert points[1024] is None  # more ranks than heads


@pytest.mark.parametrize("question", [training.QUESTION, kv_cache.QUESTION, compute.QUESTION, pipeline.QUESTION])
def test_every_numeric_field_has_values_that_it_takes_and_its_own_among_them(question):
    wrong = []
    for label, field in sweep.fields(question, Scenario({})).items():
        values, now = sweep.values_of(field, Scenario({})), Scenario({}).value(field)
        if len(values) < 2 or (isinstance(now, int | float) and now not in values):
            wrong.append((label, values))
    assert wrong == []


def test_the_csv_of_curves_has_every_point_exactly_and_leaves_unknown_ones_empty():
    lines = [Curve("one", [(1.0, 2**60 + 0.0), (2.0, None)]), Curve("two", [(2.0, 0.1)])]
    rows = list(csv.reader(io.StringIO(charts.as_csv(lines, "GPUs", "bytes"))))
    assert rows == [["GPUs", "one (bytes)", "two (bytes)"], ["1", str(2**60), ""], ["2", "", "0.1"]]
