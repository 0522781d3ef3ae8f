"""What the pages are made of, without a browser: a field reads what people write, and writes what it reads."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from calc.commands import COMMANDS
from calc.errors import InputError
from pages.ui import parts
from pages.ui.fields import fields_of
from pages.ui.measuring.runs import MeasurePlan
from pages.ui.scenario import SHARED, START, Scenario, start
from pages.ui.text import plain

PAGES = sorted(path for path in (Path(__file__).parents[2] / "pages").glob("*.py") if path.name != "__init__.py")
PLANS = (*SHARED, *(command.plan for command in COMMANDS.values()), MeasurePlan)
EVERY = [field for plan in PLANS for field in fields_of(plan).values()]


def field(command: str, name: str):
    return fields_of(COMMANDS[command].plan)[name]


@pytest.mark.parametrize(
    ("command", "name", "text", "value"),
    [
        ("train", "seq", "32k", 32768),
        ("train", "seq", "4_096", 4096),
        ("train", "seq", " 8,192 ", 8192),
        ("train", "micro_batch", "1e2", 100),
        ("train", "global_batch", "", None),
        ("train", "virtual_stages", "2", 2),
        ("train", "sequence_parallel", "on", True),
        ("train", "sequence_parallel", "auto", None),
        ("train", "lora_targets", "q_proj, v_proj", ("q_proj", "v_proj")),
        ("train", "nvme", "true", True),
        ("compute", "tokens", "1T", 10**12),
        ("compute", "tokens", "2e12", 2 * 10**12),
        ("compute", "tokens", "1.5B", 1_500_000_000),
        ("compute", "mfu", "0.5", 0.5),
        ("pipeline", "forward", "1,2,3,4", (1.0, 2.0, 3.0, 4.0)),
    ],
)
def test_a_field_reads_what_people_write(command, name, text, value):
    assert field(command, name).read(text) == value


@pytest.mark.parametrize(
    ("command", "name", "text"),
    [
        ("train", "seq", "0"),
        ("train", "seq", "-4"),
        ("train", "seq", "4096.5"),
        ("train", "seq", ""),
        ("train", "seq", "banana"),
        ("train", "seq", "9" * 400),
        ("train", "recipe", "fp33"),
        ("train", "objective", "ppo"),
        ("train", "reshard_after_forward", "maybe"),
        ("train", "sequence_parallel", "true"),
        ("train", "nccl_mib", "nan"),
        ("compute", "mfu", "1.5"),
        ("compute", "mfu", "inf"),
        ("compute", "tokens", "1e99"),
        ("pipeline", "schedule", "2f2b"),
        ("pipeline", "forward", "1,x"),
        ("pipeline", "forward", "0"),
    ],
)
def test_a_text_that_a_field_cannot_take_is_refused_by_its_name(command, name, text):
    with pytest.raises(InputError, match=f"^{name}: ") as refused:
        field(command, name).read(text)
    assert re.search(" must be ", str(refused.value))


def test_every_start_value_is_written_as_its_own_field_reads_it():
    wrong = [each.key for each in EVERY if each.read(each.write(start(each))) != start(each)]
    assert wrong == []


def test_what_the_app_starts_with_is_a_value_of_its_field():
    starts = {each.key: each for each in EVERY if each.key in START}
    assert set(starts) == set(START)
    assert all(starts[key].checked(value) == value for key, value in START.items())


def test_names_that_two_plans_share_have_one_value_only_where_they_mean_the_same():
    assert field("train", "seq").key == field("compute", "seq").key == "seq"
    assert field("train", "tp").key == field("serve", "tp").key
    assert field("train", "lora_rank").key != field("params", "lora_rank").key


def test_degrees_that_are_set_make_the_layout_one_by_hand():
    before = Scenario({"gpus": 8})
    assert before.of(COMMANDS["train"].plan).dp == 8
    after = before.changed({"tp": 2})
    assert after.layout == "by hand"
    assert (after.of(COMMANDS["train"].plan).dp, after.of(COMMANDS["train"].plan).tp) == (8, 2)
    assert before.changed({"seq": 512}).layout == "auto"


def test_each_part_has_a_colour_of_its_own():
    tables = (parts.MEMORY, parts.MODEL, parts.TIME)
    common = [parts.COLOURS[name] for name in (parts.OTHER, parts.OVERHEAD, parts.FREE)]
    for table in tables:
        colours = [*table.values(), *common]
        assert len(set(colours)) == len(colours)
    assert len(parts.COLOURS) == sum(map(len, tables)) + len(common)  # no name stands in two tables
    assert set(parts._NAMES.values()) <= set(parts.COLOURS)


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


def test_every_page_is_in_the_navigation():
    from app import pages

    assert sorted(Path(str(page.__file__)).name for page in pages()) == [path.name for path in PAGES]
