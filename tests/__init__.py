"""The tests. `python -m tests.all_platforms` runs them on all platforms that can be had."""
