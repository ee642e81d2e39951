"""The drafter and the decode loop in plain torch, for tests to compare with."""
