"""Weight syncs between worlds: senders, receivers and their agreement."""
