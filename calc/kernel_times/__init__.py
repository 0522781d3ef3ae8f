"""Seconds of one kernel on a GPU: from measured tables, from the user's own measurements, or from the roofline."""

from calc.kernel_times.times import KernelTimes, kernel_times

__all__ = ["KernelTimes", "kernel_times"]
