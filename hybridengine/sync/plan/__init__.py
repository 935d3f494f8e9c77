"""Who sends which slice to whom, in which bucket."""
