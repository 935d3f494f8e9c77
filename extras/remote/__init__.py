"""Engines, servers and critics on ranks of their own."""
