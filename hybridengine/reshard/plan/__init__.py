"""Planning: which rank sends which slice to which, in which bucket."""
