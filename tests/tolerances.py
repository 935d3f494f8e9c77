"""Every tolerance of the tests, with its reason. Comparisons are against float64."""

# Statistics are float64 inside; only the result is rounded to float32 (2^-24), but a difference
# of float32 inputs is exact only relative to the inputs, hence the absolute part.
ADVANTAGE = {"rtol": 2e-6, "atol": 2e-6}
