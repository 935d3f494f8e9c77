"""The tests; ranks and other processes that they start import this first, as pytest does."""

import sys

import hybridengine.kernels

# transformers looks for a package `kernels` and finds the folder of the repository's root: without
# this it would be imported a second time, and its copies of the operators replace the first ones.
sys.modules.setdefault("kernels", hybridengine.kernels)
