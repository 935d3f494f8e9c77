"""Plan: which rank sends which slice of which parameter to which rank, in which bucket."""
