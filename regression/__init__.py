"""The judge: reads Runs, writes verdicts. No network, no clock, no engine."""
