"""`hybridengine tune`: short probes of a job's sizes, on its ranks and with its model."""
