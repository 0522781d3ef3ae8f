"""How far attention and its gradient may lie from the exact ones in fp32: a forward error analysis, element by element.

Each operation in fp32 errs by at most u = 2^-24 of its result, and a sum of n products, in any order, by at most γ_n = nu/(1 - nu)
of the sum of their sizes (Higham, Accuracy and Stability of Numerical Algorithms, 2nd edition, sections 2.2 and 3.1). The bounds below
carry that through each step, so they hold on any processor, whatever the order of its sums; cancellation, as in dP - delta,
is in them because sizes are added where the operation subtracts.
"""

import torch

from kernels.standard_attention import visible
from tests.kernels.precision import UNIT

EXPONENTIAL = 4  # units of the last place: libraries' exp and exp2, and the division by their sum


def gamma(n):
    """γ_n: the largest relative error of n roundings one after another."""
    return n * UNIT / (1 - n * UNIT)


def attention_error(q, k, v, dout, *, causal, window):
    """Bounds on |error| of (out, dq, dk, dv): float64 tensors of their shapes. As many heads of keys as of queries."""
    q, k, v, dout = (x.detach().cpu().double() for x in (q, k, v, dout))
    (queries, size), keys, width = q.shape[-2:], k.shape[-2], v.shape[-1]
    scale = size**-0.5
    scores = q @ k.mT * scale
    seen = visible(queries, keys, causal, window, q.device)
    log_sum = scores.masked_fill(~seen, -torch.inf).logsumexp(-1, keepdim=True)
    p = torch.exp(scores - log_sum).masked_fill(~seen, 0)

    # exp turns the absolute error of its argument into a relative one; the sum of the weights has their mean error
    argument = gamma(size + 4) * (q.abs() @ k.abs().mT * scale) + gamma(4) * (scores.abs() + log_sum.abs())
    weight = (argument + gamma(EXPONENTIAL)).masked_fill(~seen, 0)
    p_error = p * (weight + (p * weight).sum(-1, keepdim=True) + gamma(keys))
    out, out_error = p @ v, p_error @ v.abs() + gamma(keys) * (p @ v.abs())

    dp, dp_error = dout @ v.mT, gamma(width) * (dout.abs() @ v.abs().mT)
    delta = (dout * out).sum(-1, keepdim=True)
    delta_error = (dout.abs() * (out_error + gamma(width) * out.abs())).sum(-1, keepdim=True)
    ds = p * (dp - delta)
    ds_error = p_error * (dp - delta).abs() + p * (dp_error + delta_error) + gamma(2) * ds.abs()
    dq_error = scale * ((ds_error + gamma(keys + 2) * ds.abs()) @ k.abs())
    dk_error = scale * ((ds_error + gamma(queries + 2) * ds.abs()).mT @ q.abs())
    dv_error = (p_error + gamma(queries) * p).mT @ dout.abs()
    return out_error, dq_error, dk_error, dv_error
