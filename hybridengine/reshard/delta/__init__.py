"""Delta sync: only the elements whose bits changed since the last sync travel.

find     ChangeFinder  what changed in this rank's shards, and whether sending only that pays
message  Header        one sender's changes for one receiver: position gaps and values
group    DeltaGroups   follows changes from shards to messages, and from there to the engine
sync     DeltaSync     between ranks that train and hold the engine

Between worlds of their own: `disaggregated.delta`.
"""
