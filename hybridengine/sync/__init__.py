"""Weight sync from FSDP2 shards to the tensor-parallel weights of engines, without redundancy.

    loader         EngineLayout   strided copies, as the engine loads: parameter → engine tensor
    planner        ReshardPlan    who sends which slice to whom, in which bucket; equal on all ranks
    trainers       Trainers       what the training ranks read and agree on: TrainedTensors
    weight_target  WeightTarget   an engine's tensors and their state: version, partial, discarded
    mover          Mover          dense, FP8 or changed elements, over a transport, into the target
    resharder      Resharder      engine in the trainers' processes

Layouts and plans are made once, the rest runs at every sync. Users import `hybridengine.reshard`.
"""
