"""Weight sync from FSDP2 shards to the tensor-parallel weights of engines, without redundancy.

    record     EngineLayout   strided copies: trained parameter → engine tensor, as the engine loads
    plan       ReshardPlan    who sends which slice to whom, in which bucket; the same on every rank
    trainers   Trainers       what the training ranks read, and agree on
    trained    TrainedTensors the trainer's shards, adapters merged
    delta      ChangeFinder   what changed since the sync before
    target     WeightTarget   an engine's tensors and what they are: version, partial, discarded
    move       Mover          the straight line: source → payload → transport → target
    resharder  Resharder      engine in the trainers' processes

`record` and `plan` run once, the rest at every sync. Users import `hybridengine.reshard`.
"""
