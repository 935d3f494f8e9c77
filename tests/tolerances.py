"""Every tolerance of the tests, with its reason. Comparisons are against float64."""

# Statistics are float64 inside; only the result is rounded to float32 (2^-24), but a difference
# of float32 inputs is exact only relative to the inputs, hence the absolute part.
ADVANTAGE = {"rtol": 2e-6, "atol": 2e-6}

# token_log_probs, float32 inside: a few roundings (2^-24 each) of numbers of the size of the
# largest log-prob involved (about 20 for the logits of the tests), plus the vectorised exp (2^-22).
LOG_PROB = {"rtol": 2e-6, "atol": 4e-6}
# Their gradients are of size 1 at most before the incoming gradient (which the tests keep near 1).
LOG_PROB_GRAD = {"rtol": 1e-5, "atol": 2e-6}
# The gradient has the dtype of the logits: one rounding to 8 (bfloat16) or 11 (float16) bits.
GRAD_ROUNDING = {"float32": 0.0, "bfloat16": 2.0**-8, "float16": 2.0**-11}
# The promise: at most twice the error of plain PyTorch on the same inputs; the floor is
# one rounding of the exact result, where plain PyTorch happens to be exactly right.
ERROR_FACTOR = 2.0
ROUNDING = 2.0**-24
# A row with a logit offset of 1e4, which changes no difference of its logits: with fused
# multiply-add the kernels subtract a rounded reference and correct for the rounding in float64 at
# the end of the row, so results differ by at most one unit in the last place, and entries of the
# gradient, of size 1 at most, by that of log p.
LARGE_OFFSET = {"rtol": 2.0**-23, "atol": 2.0**-23}

# Policy loss in float64, two orders of the same sum (micro-batches, permutations).
POLICY_LOSS_SPLIT = {"rtol": 1e-12, "atol": 1e-12}

# Policy loss in float32 against float64: exp of a float32 log-ratio of size 20 has a relative
# error of 20 * 2^-24 = 1.2e-6 from its argument alone; a few operations come on top.
POLICY_LOSS = {"rtol": 1e-5, "atol": 1e-6}

# Against verl, which works in float32 throughout: its rounding and ours, each a few 2^-24 of
# intermediate values that exceed the results by up to a factor of ten.
VERL = {"rtol": 2e-5, "atol": 2e-6}

# linear_*: the logits themselves come from a float32 matrix product over H; its rounding, about
# sqrt(H) 2^-24 of their size, is in log-probs and gradients alike.
LINEAR = {"rtol": 1e-4, "atol": 2e-5}

# Against TRL, float32 throughout as verl is.
TRL = VERL
# TRL divides by std + 1e-4, ours by sqrt(var + 1e-8), for values of size 1.
TRL_EPSILON = {"rtol": 2e-4, "atol": 1e-5}

# An adapter merged by PEFT and by us: W + s (B A) against W + (s B) A in float32, weights below 1.
MERGED = {"rtol": 1e-6, "atol": 1e-7}

# tree_attention in float64: another order of sums over some hundreds of keys.
ATTENTION_FLOAT64 = {"rtol": 1e-9, "atol": 1e-11}
# In float32: scores up to about 30 carry an error of 30 * 2^-24 into the exponent, so weights and
# gradients one of 2e-6 relative to their largest summands, which are of size 1 to 10.
ATTENTION = {"rtol": 2e-5, "atol": 2e-5}
# With 16-bit inputs, relative to the largest entry: P and dS are rounded to the inputs' dtype
# before they are multiplied, and the result once more.
ATTENTION_ROUNDED = {"bfloat16": 2.0**-6, "float16": 2.0**-9}
# dS = P (dP - delta) cancels where few keys have all the weight, but delta = grad_out . out is of
# an out with two roundings, of P and of the result: this part of the largest dP is left.
ATTENTION_DELTA = {"bfloat16": 2.0**-8, "float16": 2.0**-11}

# linear_recurrence, float32 states: decays and the delta rule shrink a rounding of a state, so that
# errors stay at some tens of 2^-24 of the largest entry, over any number of tokens.
LINEAR_RECURRENCE = 1e-5
# causal_conv1d: at most five float32 roundings and those of the activation, relative to the largest
# entry; a gradient of the weight is a sum over all tokens.
CAUSAL_CONV = 2e-6
