"""The bytes of a sync: payloads, transports, and the mover that joins them."""
