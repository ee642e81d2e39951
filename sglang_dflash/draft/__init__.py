"""The drafter: its model, runner, head, window and context."""
