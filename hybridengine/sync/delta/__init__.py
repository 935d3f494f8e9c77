"""Syncs that send only what changed."""
