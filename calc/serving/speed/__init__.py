"""How fast a served model answers: the ideal roofline, and steps summed from measured kernels."""
