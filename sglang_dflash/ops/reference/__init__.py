"""Plain-torch twins of the serving code; nothing here imports sglang."""
