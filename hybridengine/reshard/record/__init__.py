"""Recording: which strided copies turn trained parameters into an engine's weights."""
