"""Score responses. Modules that reward workers import need only the standard library."""
