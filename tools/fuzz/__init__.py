"""Call the functions of hybridengine._C with random arguments, most of them wrong in some way.

    python -m tools.fuzz --calls 100000           # --seed 7: others
    python -m tools.fuzz --first 8123 --calls 1   # the call that ended the process, again

Every call has to return or to raise a Python error, and to access no memory but that of its
arguments. The calls run in a process of its own; the number of the call that ended it, or that
takes minutes, is printed. Call number n depends on the seed and n alone.

Without a sanitizer, half of the tensors begin or end at a page that cannot be accessed, so that an
access beyond them ends the process. `make test-sanitized` finds any other wrong access, too.
"""
