"""How fast a served model answers: the ideal roofline, and steps summed from measured kernels."""

from calc.serving.speed.roofline import Speed, decode_weights, prefill_flops, speed

__all__ = ["Speed", "decode_weights", "prefill_flops", "speed"]
