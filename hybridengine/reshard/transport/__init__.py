"""Transport: what moves messages between the ranks of a plan."""
