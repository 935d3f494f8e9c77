"""What runs in a reward worker process: the call loop, the user's files, the built-in rules.

A package separate from `rewards`, because it imports only the standard library: a worker starts
in a tenth of a second and holds neither torch nor the engine.
"""
