"""Delta sync: only the elements whose bits changed since the last sync travel.

find      ChangeFinder   what changed in this rank's shards: optimizer, or comparison
message   Header         one sender's changes for one receiver: position gaps and values
pipeline  DeltaPipeline  follows changes from shards to messages, and from there to the engine
sync      DeltaSync      whether the engine can take a delta now, and whether that pays
"""
