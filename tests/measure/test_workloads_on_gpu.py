"""Every workload of the standard suite on a real GPU, and how near its predictions come there; skipped where there is none."""

import pytest

torch = pytest.importorskip("torch")

from measure.devices import resolve  # noqa: E402
from measure.setting import Setting  # noqa: E402
from measure.workloads import SUITES, WORKLOADS  # noqa: E402

pytestmark = [
    pytest.mark.torch,
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU"),
]
# how a quantity begins, and how far its measurement may lie from its prediction
NEAR = {"states/": 0.03, "allocated by torch": 0.03, "activations": 0.05, "peak/": 0.05, "kept/": 0.05, "FLOPs": 0.0}


@pytest.mark.parametrize("name", SUITES["standard"])
def test_a_workload_runs_on_a_gpu_and_its_bytes_are_near_what_is_predicted(name):
    device = resolve("cuda")
    torch.cuda.set_device(device.name)
    rows = list(WORKLOADS[name].run(Setting(device, "small", lambda fraction, message: None)))
    assert rows
    assert any(row.measured is not None for row in rows)
    for row in rows:
        limit = next((limit for start, limit in NEAR.items() if row.quantity.startswith(start)), None)
        if limit is not None and row.relative_error is not None:
            assert abs(row.relative_error) <= limit, row
