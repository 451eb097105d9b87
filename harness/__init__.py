"""Drives endpoints: requests out, chunks in, one row a request; owns the two front doors."""
