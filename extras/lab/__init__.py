"""Commands that look at a run or plan one: simulate, advise, compare, diagnose, view, tune."""
