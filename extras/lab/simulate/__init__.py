"""Predict a step of RL training: time by phase, memory, and the best layout of the ranks.

    result = simulate(load_simulation_config("cluster.yaml", ["model.path=Qwen/Qwen2.5-7B"]))

Nothing is run and no weights are read: first-principles formulas over `config.json`, the data sheet
of a GPU and the work of a step. docs/lab.md has the formulas, their sources and their error.

    config       its keys
    cluster      machines as numbers, and the time of a product, a copy, a collective
    model        a model, the work of a step and a layout of the ranks, as numbers
    training     forward, backward, optimizer; bytes on a rank
    generation   prefill and decode of an engine
    sync         the weight sync, by a closed form or by the reshard planner
    step         the phases of a step
    search       all layouts, the best, and why
    report       `simulate`; tables, JSON, picture
"""
