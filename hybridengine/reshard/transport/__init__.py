"""Transports between the ranks of a plan: implementations of `payload.transport.Transport`."""
