"""What the pages are made of, without a browser: widgets from plans, the check of the URL, links, the rule for page files."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest
from streamlit.testing.v1 import AppTest

from calc.compute import ComputePlan
from calc.errors import InputError, validated
from calc.parameters import ParametersPlan
from calc.pipeline import PipelinePlan
from calc.serving import ServingPlan
from calc.training import TrainingPlan
from pages.ui.address import complaint
from pages.ui.fields import meaning, refusal, written
from pages.ui.text import plain

PAGES = sorted(path for path in (Path(__file__).parents[2] / "pages").glob("*.py") if path.name != "__init__.py")
PLANS = (ParametersPlan, TrainingPlan, ServingPlan, ComputePlan, PipelinePlan)


def form() -> None:
    """A page of one form, and what its plan says; AppTest runs the body alone, so it imports for itself."""
    import streamlit as st

    from calc.training import TrainingPlan
    from pages.ui.fields import ask_plan
    from pages.ui.page import complaints

    with complaints():
        st.json(ask_plan(TrainingPlan, {"": ("seq", "zero"), "Layout": ("tp", "sequence_parallel")}).model_dump_json())


def run_form(**url: str) -> AppTest:
    test = AppTest.from_function(form, default_timeout=30)
    for name, value in url.items():
        test.query_params[name] = value
    return test.run()


def test_a_form_has_a_widget_for_every_field_and_starts_at_the_plans_defaults():
    test = run_form()
    kinds = (test.number_input, test.selectbox, test.toggle, test.text_input)
    assert {widget.key for kind in kinds for widget in kind} == set(TrainingPlan.model_fields)
    assert TrainingPlan.model_validate_json(test.json[0].value) == TrainingPlan()


def test_a_url_sets_a_widget_of_each_kind():
    test = run_form(
        seq="5000", recipe="amp", reshard_after_forward="false", tp="4", sequence_parallel="off", nccl_mib="12.5"
    )
    assert TrainingPlan.model_validate_json(test.json[0].value) == TrainingPlan(
        seq=5000, recipe="amp", reshard_after_forward=False, tp=4, sequence_parallel=False, nccl_mib=12.5
    )


def test_a_slider_sets_the_number_beside_it():
    test = run_form()
    test.select_slider(key="seq slider").set_value(8192).run()
    assert test.number_input(key="seq").value == 8192


@pytest.mark.parametrize("seq", [1, 5000])
def test_a_number_that_is_no_stop_of_the_slider_stays_exact_on_both(seq: int):
    test = run_form(seq=str(seq))
    assert test.number_input(key="seq").value == seq
    assert test.select_slider(key="seq slider").value == seq
    test.select_slider(key="seq slider").set_value(8192).run()
    assert test.number_input(key="seq").value == 8192
    assert f"{seq:,}" not in test.select_slider(key="seq slider").options


def test_what_is_not_modelled_is_not_offered():
    assert set(run_form().selectbox(key="objective").options) == {"pretrain", "sft", "dpo", "grpo"}


def test_a_broken_rule_is_one_message_and_every_widget_stays():
    with pytest.raises(InputError) as broken:
        validated(TrainingPlan, {"dp": 3, "dp_replicate": 2})
    test = run_form(dp="3", dp_replicate="2", seq="5000")
    assert [error.value for error in test.error] == [plain(str(broken.value))]
    assert test.number_input(key="dp_replicate").value == 2
    assert test.number_input(key="seq").value == 5000
    assert not test.exception


@pytest.mark.parametrize(
    ("plan", "name", "text"),
    [
        (TrainingPlan, "seq", "0"),
        (TrainingPlan, "seq", "4096.5"),
        (TrainingPlan, "seq", ""),
        (TrainingPlan, "seq", "9" * 400),
        (TrainingPlan, "recipe", "fp33"),
        (TrainingPlan, "reshard_after_forward", "maybe"),
        (TrainingPlan, "sequence_parallel", "true"),
        (TrainingPlan, "nccl_mib", "nan"),
        (ComputePlan, "mfu", "1.5"),
        (ComputePlan, "mfu", "inf"),
        (ComputePlan, "tokens", str(2**53)),
        (PipelinePlan, "schedule", "2f2b"),
        (PipelinePlan, "forward", "1,x"),
        (PipelinePlan, "forward", "0"),
    ],
)
def test_a_value_that_a_field_cannot_take_is_refused(plan, name, text):
    assert refusal(plan, name, text)


@pytest.mark.parametrize(
    ("plan", "name", "text"),
    [
        (TrainingPlan, "seq", "123"),
        (TrainingPlan, "global_batch", ""),
        (TrainingPlan, "tp", "3"),  # whether 3 divides the heads is for the page
        (TrainingPlan, "virtual_stages", "2"),  # needs pp above 1, which may stand next to it
        (TrainingPlan, "sequence_parallel", "on"),
        (PipelinePlan, "forward", "1,2,3,4"),
        (PipelinePlan, "virtual_stages", ""),
        (ComputePlan, "mfu", "0.5"),
    ],
)
def test_a_value_that_a_field_can_take_is_not(plan, name, text):
    assert refusal(plan, name, text) == ""


@pytest.mark.parametrize("plan", PLANS)
def test_every_default_is_written_as_its_own_field_reads_it(plan):
    for name, field in plan.model_fields.items():
        text = written(field, field.get_default(call_default_factory=True))
        assert refusal(plan, name, text) == "" or text == ""


def test_a_complaint_names_parameter_value_and_what_is_allowed():
    schema = {"seq": [TrainingPlan, ComputePlan]}
    assert complaint(schema, "b_seq", "x") == "b_seq: 'x' is not allowed; " + refusal(TrainingPlan, "seq", "x")
    assert complaint(schema, "sek", "1") == "sek: unknown parameter (its value is '1'); close ones are seq"


def test_names_that_two_plans_share_mean_the_same_unless_kept_apart():
    assert meaning(TrainingPlan.model_fields["seq"]) == meaning(ComputePlan.model_fields["seq"])
    assert meaning(TrainingPlan.model_fields["tp"]) == meaning(ServingPlan.model_fields["tp"])
    assert meaning(TrainingPlan.model_fields["lora_rank"]) != meaning(ParametersPlan.model_fields["lora_rank"])


def test_text_from_outside_is_never_read_as_markdown():
    assert plain("*a* [b](c) <i> $x$ :red[y] `z`") == (r"\*a\* \[b\]\(c\) \<i\> \$x\$ \:red\[y\] \`z\`")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.stem)
def test_a_page_gathers_calls_and_shows(path: Path):
    """No arithmetic, no session bookkeeping, no try in a page's file; and it ends as every page does."""
    tree = ast.parse(path.read_text())
    for node in ast.walk(tree):
        assert not isinstance(node, ast.BinOp | ast.AugAssign | ast.Try), f"line {node.lineno}"
        assert not (isinstance(node, ast.Attribute) and node.attr == "session_state"), f"line {node.lineno}"
    assert ast.unparse(tree.body[-1]) == "if __name__ == '__main__':\n    from app import main\n    main()"
