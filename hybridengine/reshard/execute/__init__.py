"""Execute: pack, all-to-all, unpack into the engine's weights, verify."""
