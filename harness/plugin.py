"""The pytest plugin: fixtures that start replicas, drive Runs and compare them."""
