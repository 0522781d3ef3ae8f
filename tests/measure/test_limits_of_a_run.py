"""What bounds a run from within: its own alarm, its memory on the CPU; and what its times are boiled down to."""

import resource

import pytest

from measure import child
from measure.devices import Device
from measure.run_options import RunOptions

pytestmark = pytest.mark.torch

CPU = Device("cpu", "cpu", "a test's processor", 2**34)


def test_a_process_that_no_one_stops_ends_itself_half_a_minute_after_its_time(monkeypatch):
    alarms, told = [], []
    monkeypatch.setattr(
        child.faulthandler, "dump_traceback_later", lambda seconds, exit: alarms.append((seconds, exit))
    )
    child._start(
        RunOptions(workload="decoder-states", seconds=50.0), "a run", "cpu", lambda *given, **said: told.append(given)
    )
    assert alarms == [(80.0, True)]
    assert told == [("started",)]


@pytest.mark.parametrize(("most", "wanted"), [(resource.RLIM_INFINITY, 500), (400, 400), (600, 500)])
def test_on_a_cpu_a_run_may_take_its_share_of_the_free_memory(monkeypatch, most, wanted):
    limits = []
    monkeypatch.setattr(child, "free_memory", lambda: 1000)
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (0, most))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, values: limits.append((kind, values)))
    child._guard_memory(CPU, 0.5)
    assert limits == [(resource.RLIMIT_DATA, (wanted, most))]


def test_the_spread_is_the_20th_and_the_80th_percentile():
    from measure.timing import spread

    assert spread([float(at) for at in range(11)]) == (2.0, 5.0, 8.0)
    assert spread([10.0, 0.0]) == (2.0, 5.0, 8.0)
