"""The ledger: rows, Runs, clock, names, spans, metrics. Imports no other room."""
