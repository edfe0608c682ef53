"""Attention of a tile of query rows over stored tokens, inside Triton kernels: online softmax.

Owns the arithmetic; which tokens are read is the caller's. Sums are fp32; weights are rounded to
the compute dtype before they meet V.
"""

from __future__ import annotations

import triton
import triton.language as tl

from winnow.ops.triton_codec import dot, round_to
from winnow.ops.triton_pages import load_halves


@triton.jit
def attend_tokens(
    first_out, second_out, maxima, sums, first_q, second_q,
    key_codes, key_scales, value_codes, value_scales, tokens, first_token, visible, most_visible,
    score_scale, DIM: tl.constexpr, KEY_FORMAT: tl.constexpr, VALUE_FORMAT: tl.constexpr,
    DTYPE: tl.constexpr,
):  # fmt: skip
    """Take `tokens` [T] of a block, places in its page, into the running results of M rows.

    The block begins at token `first_token` of its sequence; a row sees the tokens before
    `visible` [M], none sees one at or after `most_visible`, which is not read. `first_out`,
    `second_out` fp32 [M, DIM / 2], `maxima`, `sums` fp32 [M]; queries `DTYPE` [M, DIM / 2].
    `score_scale` makes scores exponents of 2. Returns the four results.
    """
    place = first_token + tokens
    real = place < most_visible
    first, second = load_halves(key_codes, key_scales, tokens, real, DIM, KEY_FORMAT, DTYPE)
    scores = tl.zeros((first_q.shape[0], tokens.shape[0]), tl.float32)
    scores = dot(first_q, tl.trans(first), scores)
    scores = dot(second_q, tl.trans(second), scores) * score_scale
    scores = tl.where(place[None, :] < visible[:, None], scores, float("-inf"))
    highest = tl.maximum(maxima, tl.max(scores, 1))
    # Where nothing is above -inf yet, any finite number keeps exponents from being NaN.
    base = tl.where(highest == float("-inf"), 0.0, highest)
    weights = tl.exp2(scores - base[:, None])
    shrink = tl.exp2(maxima - base)
    sums = sums * shrink + tl.sum(weights, 1)
    weights = round_to(weights, DTYPE)
    first, second = load_halves(value_codes, value_scales, tokens, real, DIM, VALUE_FORMAT, DTYPE)
    first_out = dot(weights, first, first_out * shrink[:, None])
    second_out = dot(weights, second, second_out * shrink[:, None])
    return first_out, second_out, highest, sums
