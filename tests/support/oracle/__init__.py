"""The drafter and the decode loop in plain torch, which tests compare with."""
