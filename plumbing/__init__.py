"""Not the method: skip it on first reading. What each module holds stands in README.md beside this file."""
