"""Someone else's results come in whole, labelled and exact, or not at all."""

import json

import pytest

from calc.errors import InputError
from calc.measurements import imported as module
from calc.measurements.imported import LARGEST_FILE, compared, imported, machine_of
from calc.measurements.records import LARGEST_LIST, Measured, Records, as_csv, as_json

H100 = {"device": "NVIDIA H100 80GB HBM3", "catalogue": "h100-sxm-80gb", "memory_bytes": 85_017_755_648}
CPU = {"device": "a processor", "catalogue": ""}
ROWS = [
    Measured("small, fp32", "parameters/head/weight", 2**53 + 1, 2**53 + 1, "bytes"),
    Measured("4096×4096×4096", "rate/bf16/torch", 989.5, 790.25, "TFLOP/s", 780.0, 801.5),
    Measured("-a case that a spreadsheet would run", "=quantity", None, 1.5, "GB/s"),
]


@pytest.fixture
def theirs(tmp_path):
    store = Records(tmp_path / "theirs.sqlite3")
    for run, workload in (("one", "matmul-rate"), ("two", "decoder-states")):
        store.begin(run, workload, {}, H100)
        for row in ROWS:
            store.add(run, row)
    return store.rows()


@pytest.fixture
def mine(tmp_path):
    return Records(tmp_path / "mine.sqlite3")


@pytest.mark.parametrize("form", [as_csv, as_json])
def test_what_was_exported_comes_in_again_exactly_and_labelled(theirs, mine, form):
    assert mine.take(imported(form(theirs).encode(), "lab.csv")) == 6
    found = mine.rows()
    for key in ("workload", "case", "quantity", "predicted", "measured", "relative_error", "unit", "p20", "p80"):
        assert [row[key] for row in found] == [row[key] for row in theirs]
    assert isinstance(found[0]["measured"], int)
    assert all(row["environment"] == {**H100, "origin": "lab.csv"} for row in found)
    assert [(run.outcome, run.message) for run in mine.runs()] == [("imported", "from lab.csv")] * 2
    assert machine_of(found[0]["environment"]) == "NVIDIA H100 80GB HBM3 (from lab.csv)"


def test_csv_and_json_of_one_run_are_one_run(theirs):
    assert [run.id for run, _ in imported(as_csv(theirs), "a")] == [run.id for run, _ in imported(as_json(theirs), "b")]


def test_a_file_is_taken_in_once(theirs, mine):
    mine.take(imported(as_csv(theirs), "lab.csv"))
    with pytest.raises(InputError, match="is here already"):
        mine.take(imported(as_json(theirs), "again.json"))
    assert len(mine.rows()) == 6


def test_nothing_of_a_file_is_kept_when_a_later_run_is_here_already(theirs, mine):
    mine.take(imported(as_csv(theirs[3:]), "lab.csv"))
    with pytest.raises(InputError, match="is here already"):
        mine.take(imported(as_csv(theirs), "lab.csv"))
    assert len(mine.rows()) == 3


def altered(rows, **values):
    return json.dumps([{**rows[0], **values}])


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"measured": "fast"}, "row 1: measured"),
        ({"measured": 2**63}, r"below 2\*\*63"),
        ({"measured": True}, "row 1: measured"),
        ({"workload": ""}, "row 1: workload"),
        ({"case": "x" * 301}, "row 1: case"),
        ({"quantity": "a\nb"}, "printable"),
        ({"unit": None}, "row 1: unit"),
        ({"surprise": 1}, "row 1: surprise: unknown field"),
        ({"environment": "H100"}, "row 1: environment"),
        ({"environment": {"a": {"b": 1}}}, "row 1: environment"),
        ({"environment": {str(n): n for n in range(41)}}, "row 1: environment"),
    ],
)
def test_a_row_that_is_not_right_is_named(theirs, values, message):
    with pytest.raises(InputError, match=message):
        imported(altered(theirs, **values), "lab.json")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "neither JSON nor a CSV"),
        ("a,b\n1,2\n", "lacks workload, case"),
        ("[", "not JSON"),
        ("[" * 100_000, "not JSON"),
        ("{}", "a JSON list"),
        ("[]", "0 rows"),
        ("[1]", "row 1: it must be an object"),
        (b"\xff\xfe\x00", "UTF-8"),
        ('[{"measured": NaN}]', "row 1"),
        (b" " * (LARGEST_FILE + 1), "too many"),
    ],
)
def test_a_file_that_is_none_of_ours_is_refused_in_one_line(text, message):
    with pytest.raises(InputError, match=message) as caught:
        imported(text, "file")
    assert "\n" not in str(caught.value)


def test_numbers_of_no_size_are_refused(theirs):
    text = as_json(theirs).replace("790.25", "NaN")
    with pytest.raises(InputError, match="row 2: measured"):
        imported(text, "lab.json")
    with pytest.raises(InputError, match="row 2: measured"):
        imported(as_csv(theirs).replace("790.25", "inf"), "lab.csv")


def test_a_csv_line_with_cells_too_many_is_named(theirs):
    with pytest.raises(InputError, match="row 1: it must be an object"):
        imported(as_csv(theirs[:1]).rstrip("\n") + ",more\n", "lab.csv")


def test_two_machines_stand_side_by_side(theirs, mine):
    mine.take(imported(as_csv(theirs), "lab.csv"))
    mine.begin("mine", "matmul-rate", {}, CPU)
    mine.add("mine", ROWS[1]._replace(measured=1.0))
    mine.add("mine", ROWS[1]._replace(measured=7.9025))  # the newest counts
    lines = compared(mine.rows(), "h100", "processor")
    (line,) = [line for line in lines if line["ratio"] is not None]
    assert (line["quantity"], line["first"], line["second"], line["ratio"]) == ("rate/bf16/torch", 790.25, 7.9025, 0.01)
    assert line["second_machine"] == "a processor"
    assert sum(line["second"] is None for line in lines) == 5


@pytest.mark.parametrize("name", ["b200", "r"])
def test_a_machine_that_is_not_one_is_refused_with_those_there_are(theirs, mine, name):
    mine.take(imported(as_csv(theirs), "lab.csv"))
    mine.begin("mine", "matmul-rate", {}, CPU)
    mine.add("mine", ROWS[1])
    with pytest.raises(InputError, match=r"NVIDIA H100 80GB HBM3 \(from lab.csv\); a processor"):
        compared(mine.rows(), name, "processor")


@pytest.mark.parametrize(
    "text",
    [
        as_csv([]) + ",,,,,,,,,,,\n" * 170_000,
        "[" + ",".join(['{"workload":1}'] * 130_000) + "]",
        "[" + "{}," * 700_000 + "{}]",
    ],
    ids=["csv", "json", "rows without a name"],
)
def test_too_many_rows_are_refused_before_they_are_parsed(text, monkeypatch):
    checked = []
    monkeypatch.setattr(module, "_from_cells", checked.append)
    monkeypatch.setattr(module, "_checked", lambda values, line: checked.append(line))
    with pytest.raises(InputError, match="read at once"):
        imported(text, "many")
    assert len(checked) <= LARGEST_LIST


def test_one_long_row_is_not_built():
    with pytest.raises(InputError, match="not JSON"):
        imported('[{"a":[' + "{}," * 500_000 + "{}]}]", "long")


def test_a_line_of_many_columns_is_refused_by_its_names():
    with pytest.raises(InputError, match="has 50,012 columns"):
        imported(as_csv([]).rstrip() + ",x" * 50_000 + "\n", "wide")


@pytest.mark.parametrize("text", ["[{}", "[{} {}]", "[{},]", "[{}] x", "[1 2]"])
def test_a_list_that_is_no_json_is_refused(text, monkeypatch):
    monkeypatch.setattr(module, "_checked", lambda values, line: values)
    with pytest.raises(InputError, match="not JSON"):
        imported(text, "file")
